"""Compute what tables show from what records hold: metrics, spreads, matching, significance.
It may import `experiments`, `records` and `machine`."""
