"""Adapters of pipelines, this library's and others', to the rows of tests/behaviours/rows/training.py.

They import those rows: both are development code, and none of it is installed.
"""
