"""Make tables of records, as text and as Markdown.

This folder may import `predict`, `numbers` and the folders that these import, but not `run`.
"""
