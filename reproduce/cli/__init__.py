"""The command line: a file for each command or for related commands, and their helpers.

It may import all of `reproduce`; nothing imports it but `__main__`."""
