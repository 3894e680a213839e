"""Compute the numbers that tables show from the samples in records (files of results).

These numbers are metrics, such as the throughput, and their spreads, and the results of comparisons
and significance tests.
"""
