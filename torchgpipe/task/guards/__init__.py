"""Guards: what both passes of a task have to meet alike, or what must not leak from one task to another."""
