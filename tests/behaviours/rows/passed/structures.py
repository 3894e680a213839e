"""Test cases with a last layer that returns a structure, such as a dictionary.

`model(x)` concatenates the tensors in mappings and dataclasses. Other structures, and tensors
without a batch dimension, must raise an error.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ....plain import Plain
from ...compare import REORDERED
from ...parts.layers import Do, linear, made
from ...row import Row
from .tensors import of


@dataclass
class Scores:
    scores: Tensor
    best: Tensor
    unit: str = "points"


def dictionary(y: Tensor) -> Any:
    return {"y": y, "words": ["a", None, 2.0]}


def another_mapping(y: Tensor) -> Any:
    return OrderedDict(y=y, twice=y)


def in_a_dataclass(y: Tensor) -> Any:
    return Scores(y, y.argmax(1))


def nested(y: Tensor) -> Any:
    return {"scores": Scores(y.sin(), y.exp()), "hidden": (y, [y.cos()])}


def with_state(y: Tensor) -> Any:
    """Return a dictionary of `y` and a tensor with the batch in dimension 1, as an LSTM's state."""
    return {"y": y, "state": y[None]}


def with_mean(y: Tensor) -> Any:
    return {"y": y, "mean": y.mean()}


def with_a_number(y: Tensor) -> Any:
    return {"y": y, "first": y[0, 0].item()}


def with_length(y: Tensor) -> Any:
    """Return a dictionary whose only key names the number of samples in `y`.

    So the last micro-batch, which is smaller, has another key than the others.
    """
    return {f"{len(y)} samples": y}


def like_an_lstm(y: Tensor) -> Any:
    return y, (y[None], y[None])


def a_list(y: Tensor) -> Any:
    return [y]


@dataclass
class Tied:
    output: Tensor
    weight: Tensor


def with_weight(self: Any, y: Tensor) -> Tied:
    return Tied(y.sin(), self.weight)


def by_weight(given: Tied) -> Tensor:
    return given.output @ given.weight


def values_in(value: Any) -> list[Any]:
    """Return a nested structure as a flat list of class names, keys and values."""
    parts: list[Any] = [*value] if isinstance(value, list | tuple) else []
    if isinstance(value, dict):
        parts = [*value, *value.values()]
    elif isinstance(value, Scores):
        parts = [*vars(value).values()]
    if not parts:
        return [value]
    found: list[Any] = [type(value).__name__]
    for part in parts:
        found += values_in(part)
    return found


def step(run: Any, x: Tensor) -> Any:
    """Run forward and backward of a model whose output is a nested structure.

    If the model is not a pipeline, its layers run on the whole mini-batch at once.
    """
    values = values_in(nn.Sequential.forward(run, x) if isinstance(run, Plain) else run(x))
    losses = [y.square().sum() for y in values if isinstance(y, Tensor)]
    torch.stack(losses).sum().backward()
    return [y.detach() if isinstance(y, Tensor) else y for y in values]


ROWS: list[Row] = []
makes: Callable[[Tensor], Any]
for makes in (dictionary, another_mapping, in_a_dataclass, nested):
    # The undivided mini-batch adds up gradients in another order.
    row = Row(f"out, {makes.__name__}", of(linear, linear, makes), use=step, tolerance=REORDERED)
    ROWS.append(row)
for makes, message in (
    (
        with_state,
        r"returns dict of tensors that differ in dimension 0.* \(1, 3, 4\)\]; return only",
    ),
    (with_mean, "differ in dimension 0, which has to be the batch"),
    (with_a_number, r"no tensors, for micro-batch 1 than for micro-batch 0; .* or call step\("),
    (with_length, "returns dict with other keys, .* for micro-batch 2 than for"),
    (like_an_lstm, "returns tuple, .* a tuple of tensors, .* without further nesting"),
    (a_list, r"returns list, but a pipeline can only concatenate a tensor.*, or call step\("),
):
    row = Row(f"out, {makes.__name__}", of(linear, linear, makes), refused={"": message})
    ROWS.append(row)
ROWS.append(
    Row(
        "a parameter in a dataclass",
        made(
            linear,
            lambda: Do(with_weight, weight=nn.Parameter(torch.eye(4) + 1)),
            lambda: by_weight,
        ),
        refused={"ranks": "a layer returned a Tied in a structure for another rank"},
    )
)
