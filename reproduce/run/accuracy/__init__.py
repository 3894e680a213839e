"""Train to an accuracy."""
