"""Compute the numbers that tables show from the samples in records (files of results).

These numbers are metrics such as the throughput, their spreads, comparisons, and significance
tests.
"""
