"""The machine that runs: its devices, and what it consists of."""
