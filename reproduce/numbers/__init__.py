"""Compute the numbers that tables show, from records: metrics, spreads, comparisons and tests.

This folder may import `experiments`, `records` and `machine`.
"""
