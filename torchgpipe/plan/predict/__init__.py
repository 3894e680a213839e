"""Predict the seconds and the bytes of a training step."""
