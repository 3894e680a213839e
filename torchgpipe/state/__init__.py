"""What a training goes on from: its state, saves of it, and their files.

It may import `partitioned` and what that imports, not `distributed` or `plan`.
"""
