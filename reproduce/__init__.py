"""Run the experiments of the GPipe papers, record the results, and make tables from the records.

tests/test_imports.py says which folder may import which.
"""
