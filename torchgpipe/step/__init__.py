"""A training step: what is asked for, losses of micro-batches, and how they become one."""
