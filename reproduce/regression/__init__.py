"""Answer "did this change slow it down?": two trees, one job, samples in turn.
It may import `tables` and what lies below, not `report`."""
