"""Hold the commands of `python -m reproduce` that are more than a call, one file each."""
