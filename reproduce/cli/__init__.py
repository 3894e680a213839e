"""Define the command line: a file for each command or group of commands, and helpers.

This folder may import all of `reproduce`. Only `__main__` imports this folder.
"""
