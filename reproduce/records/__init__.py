"""Read and write records, the files of results: measured, emulated, predicted or published.

This folder may import `machine`.
"""
