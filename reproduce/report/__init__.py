"""Report results on one page, with tables and figures that are made from records.

This folder may import the folders that `reproduce/__init__.py` names before it, except `run` and
`predict`.
"""
