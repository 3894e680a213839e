"""Define the commands of `python -m reproduce`.

`main` puts the commands together. `job` and `shared` are helpers. Every other file defines one
command, or several commands that belong together.
"""
