"""Answer "did this change slow training down?": time two source trees in one job, in turn.

It may import `tables` and what lies below, not `report`.
"""
