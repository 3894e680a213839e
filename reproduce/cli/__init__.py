"""The command line: one file for each command.
It may import all of `reproduce`; nothing imports it but `__main__`."""
