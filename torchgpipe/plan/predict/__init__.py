"""Predict how many seconds a training step takes, and how many bytes each device needs for it."""
