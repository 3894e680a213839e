"""Report results on one page, with tables and figures that are made from records.

`reproduce/__init__.py` lists the folders of `reproduce` from the lowest to the highest. This folder
may import all lower folders, such as `tables`, except `run` and `predict`.
"""
