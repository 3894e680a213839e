"""Run experiments: time rows (configurations) on real devices, emulate them, or measure memory.

This folder may import `experiments`, `records`, `models`, `machine` and `torchgpipe`.
"""
