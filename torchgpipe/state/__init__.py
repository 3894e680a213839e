"""The state of a training: what belongs to it, and how it is saved in files and loaded."""
