"""The state of a training: what it consists of, and how it is saved in files and loaded."""
