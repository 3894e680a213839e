"""Describe the machine on which the program runs, choose its devices, and run git."""
