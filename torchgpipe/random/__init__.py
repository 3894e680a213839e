"""Random number generators: their states, and generators that only one task draws from."""
