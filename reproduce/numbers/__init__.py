"""The one place that divides: spreads, metrics, matching, significance."""
