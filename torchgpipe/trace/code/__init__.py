"""Recorded calls of a module, and their Python code.

Also the sizes that numbers in the calls follow from: the batch size, and lengths of inputs.
"""
