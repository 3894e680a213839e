"""The one place that divides: spreads, metrics, matching, significance.
It may import `experiments`, `records` and `machine`."""
