"""Test cases of training. benchmarks/conformance.py also runs them on other projects' pipelines."""

from . import gradients, passed, states

ROWS = [*passed.ROWS, *gradients.ROWS, *states.ROWS]
