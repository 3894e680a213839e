"""The state of a training: what it consists of, and how it is saved in files and loaded.
It may import `partitioned` and what that imports, not `distributed` or `plan`."""
