"""Rows (test cases) of training. benchmarks/conformance.py also runs them on other projects."""

from . import gradients, passed, states

ROWS = [*passed.ROWS, *gradients.ROWS, *states.ROWS]
