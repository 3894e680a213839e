"""Run the rows of experiments."""
