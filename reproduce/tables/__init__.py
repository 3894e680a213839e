"""Make tables of records, as text and as Markdown.

This folder may import `predict`, `numbers`, and the folders that these two may import. It may not
import `run`.
"""
