"""Test cases of training, which benchmarks/conformance.py also runs on other projects."""

from . import gradients, passed, states

ROWS = [*passed.ROWS, *gradients.ROWS, *states.ROWS]
