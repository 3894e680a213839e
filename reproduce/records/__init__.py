"""Read and write records: JSON files of measured, emulated, predicted or published results."""
