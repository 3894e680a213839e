"""The calls recorded in a module's forward, and the Python code that repeats them.

Numbers in the arguments of calls can depend on the batch size and on lengths of inputs. For such
numbers, this package finds formulas.
"""
