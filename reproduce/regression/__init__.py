"""Find out whether a change slowed training down, by timing two source trees in one job.

This folder may import `tables` and the folders below it. It may not import `report`.
"""
