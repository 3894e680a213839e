"""Save the state of a training (layers, optimizer, random generators) in files, and load it."""
