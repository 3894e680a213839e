"""Compute the numbers of tables from records: metrics, spreads, comparisons, significance.

This folder may import `experiments`, `records` and `machine`.
"""
