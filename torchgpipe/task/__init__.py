"""One task: its graph, and the guards that look after what its layers meet."""
