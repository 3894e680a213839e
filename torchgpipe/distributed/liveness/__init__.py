"""How ranks learn that another one has failed, ended or hangs.
It may import `wires`, `engine` and `tensors`."""
