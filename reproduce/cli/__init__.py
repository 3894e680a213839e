"""Define the commands of `python -m reproduce`.

`main` puts the commands together. `job` and `shared` are helpers. Every other file defines one
command, or several commands that belong together.

This folder may import all of `reproduce`. Within `reproduce`, only `__main__` imports this folder.
"""
