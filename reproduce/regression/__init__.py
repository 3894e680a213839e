"""Time an old and a new version of the code alternately: has a change slowed training down?

`reproduce/__init__.py` lists the folders of `reproduce` from the lowest to the highest. This folder
may import all lower folders, such as `tables` and `run`.
"""
