"""Describe how fast devices are, from description files or from measurements on this machine."""
