"""Predict rows that are not run."""
