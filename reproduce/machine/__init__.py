"""Describe the machine on which the program runs, choose its devices, and run git.

This folder may import `torchgpipe`. Of `reproduce`, it may import only `error`.
"""
