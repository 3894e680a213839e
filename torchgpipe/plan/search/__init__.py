"""The search: which setups are tried, what is said if none fits, and data parallel training to compare with."""
