"""Predict rows that are not run.

It may import `experiments`, `records`, `models` and `torchgpipe`.
"""
