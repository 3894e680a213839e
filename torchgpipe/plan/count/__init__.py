"""Count the operators and bytes of a model's layers on `meta`, and the bytes of an optimizer."""
