"""Run the experiments of the GPipe papers, record the results, and make tables from the records.

The list `LAYERS` in tests/test_imports.py says which folders of this package each folder may
import.
"""
