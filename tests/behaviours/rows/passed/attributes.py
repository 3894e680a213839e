"""Test cases with tensors that have Python attributes, and with named tuples."""

from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ....library.layers import same
from ....plain import Plain
from ...parts.layers import Do, Pair, linear, made
from ...parts.wiring import with_skips
from ...row import Row, but_graph_never
from .skips import stashing
from .tensors import of

HERE: Any = type("Here", (Pair,), {})
"""A named tuple class that is not an attribute of a module. Other processes cannot import it."""


def marked(x: Tensor, **attributes: Any) -> Tensor:
    """Return the tanh of a tensor, with Python attributes set on the result.

    If no attributes are given, the result gets the default ones, `scale` and `names`.
    """
    if not attributes:
        attributes = {"scale": 3.0, "names": ["a", (1, {"b": None})]}
    y = x.tanh()
    vars(y).update(attributes)
    return y


def scaled(x: Any) -> Tensor:
    """Return the tensor times a factor given by its Python attributes `scale` and `names`."""
    scale = float(getattr(x, "scale", 1.0))
    names = getattr(x, "names", "x")
    return x * scale * len(names)


def marked_by_a_fraction(x: Tensor) -> Tensor:
    return marked(x, scale=Fraction(3, 2))


def marked_by_a_tensor(x: Tensor) -> Tensor:
    return marked(x, more=x.sin())


def times_more(x: Any) -> Tensor:
    return x * x.more


def mark_the_skip(x: Tensor, _: Tensor) -> Tensor:
    return marked(x)


def scale_by_the_skip(y: Tensor, skip: Tensor) -> Tensor:
    return y * scaled(skip)


def with_a_marked_skip() -> nn.Sequential:
    popping = with_skips(linear(), {}, {"a": scale_by_the_skip})
    return nn.Sequential(stashing("a", mark_the_skip), linear(), popping)


def handing_on(make: Any, take: Any) -> Any:
    """Return a function that builds a model in which one layer passes a named tuple to another.

    Args:
        make: A function that makes the named tuple from a tuple of two tensors.
        take: A function that computes a tensor from the named tuple.
    """

    def hand_on(_: Any, x: Tensor) -> Any:
        return make((x.tanh(), x.argmax(1, keepdim=True)))

    def take_it(_: Any, value: Any) -> Tensor:
        y: Tensor = take(value)
        return y

    return made(linear, lambda: Do(hand_on), nn.Identity, lambda: Do(take_it))


def product_of_pair(pair: Pair) -> Tensor:
    y: Tensor = pair.one * pair.other
    return y


def product_of_max(found: Any) -> Tensor:
    y: Tensor = found.values * found.indices
    return y


def to_a_pair(_: Any, x: Tensor) -> Pair:
    return Pair(x.tanh(), x)


def named_out(run: nn.Module, x: Tensor) -> Any:
    """Run the model, whose output is a named tuple `Pair`.

    Returns:
        Whether the output is a `Pair` (always true for the model without a pipeline), and the first
        tensor of the output.
    """
    y = run(x)
    kept = isinstance(run, Plain) or type(y) is Pair
    return kept, y[0]


ROWS = [
    Row(
        "attributes of tensors (`y.scale = 3.0`)",
        of(linear, marked, same, scaled),
        note="Ranks (processes) can send only attributes that are `None`, numbers, strings, bytes, "
        "or tuples, lists, sets and dictionaries of these.",
    ),
    Row("attributes of a skip", with_a_marked_skip),
    Row(
        "an attribute that is not plain",
        of(linear, marked_by_a_fraction, scaled),
        balance=(2, 1),
        refused={"ranks": r"outputs of partition 0 have attributes \(scale\)"},
    ),
    Row(
        "an attribute that takes a gradient",
        of(linear, marked_by_a_tensor, times_more),
        refused=but_graph_never("attribute.*more"),
        balance=(2, 1),
    ),
    Row(
        "named tuples between layers",
        handing_on(Pair._make, product_of_pair),
        note="Ranks (processes) can send a named tuple only if its class is defined at the top "
        "level of a module.",
    ),
    Row("a named tuple of PyTorch", handing_on(torch.return_types.max, product_of_max)),
    Row(
        "a named tuple of no module",
        handing_on(HERE._make, product_of_pair),
        refused={"ranks": "which other ranks cannot import"},
    ),
    Row(
        "a named tuple out",
        made(linear, linear, partial(Do, to_a_pair)),
        use=named_out,
        without={"ranks": "other ranks show what the last one has"},
    ),
]
