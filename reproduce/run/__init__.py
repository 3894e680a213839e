"""Run the rows of experiments: measure them on real devices, emulate them, or measure their memory.

This folder may import `experiments`, `records`, `models`, `machine` and `torchgpipe`.
"""
