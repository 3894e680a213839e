"""Describe the machine that runs: its devices, and what it consists of.

It may import `torchgpipe`, and nothing else of `reproduce` but `error`.
"""
