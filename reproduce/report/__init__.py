"""Report results on one page, with tables and figures that are made from records.

This folder may import `tables` and the folders below it. It may not import `run` or `predict`.
"""
