"""Devices: operators and the seconds that they take, descriptions of nodes, and the present device.

It may import nothing else of `plan`.
"""
