"""Count the operators and the bytes of a model's layers on `meta`, and an optimizer's bytes."""
