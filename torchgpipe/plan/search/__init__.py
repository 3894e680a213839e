"""The best setup: which are tried, what is said where there is none, and data parallel training beside it.

It may import all of `plan` but the planner and its report.
"""
