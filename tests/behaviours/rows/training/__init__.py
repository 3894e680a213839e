"""What a training by a pipeline relies on; benchmarks/conformance.py shows which projects do it."""

from . import gradients, passed, states

ROWS = [*passed.ROWS, *gradients.ROWS, *states.ROWS]
