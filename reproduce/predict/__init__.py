"""Predict the results of rows without running them.

This folder may import `experiments`, `records`, `models` and `torchgpipe`.
"""
