"""Read and write records: files of measured, emulated, predicted or published results."""
