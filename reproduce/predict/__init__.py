"""Predict the speed and the memory of trainings without running them."""
