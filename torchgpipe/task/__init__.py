"""One task: its graph, and what its layers meet in it: parameters, buffers, random numbers, modes."""
