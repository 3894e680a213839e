"""How fast devices are: descriptions of nodes, seconds of operators, and measurements of the present device."""
