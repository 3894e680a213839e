"""Answer "did this change slow it down?": two trees, one job, samples in turn."""
