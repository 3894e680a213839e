"""Tell how fast devices are, from descriptions of nodes or by measuring the present device."""
