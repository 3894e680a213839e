"""Time an old and a new version of the code alternately: has a change slowed training down?

This folder may import the folders that `reproduce/__init__.py` names before it, such as `tables`
and `run`. It may not import `report`.
"""
