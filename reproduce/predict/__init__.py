"""Predict the results of rows without running them."""
