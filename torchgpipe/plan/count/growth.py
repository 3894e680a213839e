"""Compute the cost for any micro-batch size, by a straight line through the costs for two sizes.

A straight line is wrong for an operator that multiplies samples with each other: with twice the
samples, it costs more than twice as much. Such an operator is easy to find, because the line
through both sizes gives a negative cost for zero samples.
"""

import warnings
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from torchgpipe.plan.count.footprint import LayerCount

KIND = attrgetter("kind", "dtype")
"""The attributes of an operator that are equal for all micro-batch sizes."""


def between(a: Any, b: Any, share: float, known: dict[tuple[int, int], Any]) -> Any:
    """Compute `a + (b - a) * share` for all floats in two equally nested tuples.

    Args:
        a: The result if `share` is 0: a float, or a tuple.
        b: The result if `share` is 1.
        share: The position between `a` and `b`; beyond them if it is below 0 or above 1.
        known: A cache of the results, by the ids of the two tuples. It is useful because layers
            that behave alike share their tuples.

    Raises:
        ValueError: If `a` and `b` differ in anything but floats.
    """
    if isinstance(a, float):
        return a + (b - a) * share
    if not isinstance(a, tuple) or len(a) != len(b):
        if a != b:
            raise ValueError(
                f"a layer's behaviour depends on the batch size: {a!r} and {b!r} differ"
            )
        return a
    key = id(a), id(b)
    if key not in known:
        items = [between(x, y, share, known) for x, y in zip(a, b, strict=True)]
        known[key] = type(a)(*items) if hasattr(a, "_fields") else tuple(items)
    return known[key]


def check_growth(
    low: Sequence[LayerCount], high: Sequence[LayerCount], sizes: tuple[int, int]
) -> None:
    """Check that the layers' costs lie on a straight line.

    Args:
        low: The layers as counted for micro-batches of the smaller size.
        high: The layers as counted for micro-batches of the larger size.
        sizes: The two sizes.

    Raises:
        ValueError: If a layer runs different operators for the two sizes.

    Warns:
        UserWarning: If the cost of an operator grows faster than the micro-batch size. The counts
            for large micro-batches are then too low.
    """
    smaller, larger = sizes
    share_of_none = smaller / (smaller - larger)
    steeper = []
    for a, b in zip(low, high, strict=True):
        first = (*a.forward, *a.backward)
        second = (*b.forward, *b.backward)
        if list(map(KIND, first)) != list(map(KIND, second)):
            raise ValueError(
                f"layer {a.name!r} runs different operators for micro-batches of {smaller} "
                f"and of {larger} samples, so its cost for other sizes cannot be computed"
            )
        for operator in between(first, second, share_of_none, {}):
            if operator.flops < 0 or operator.bytes < 0:
                steeper.append(a.name)
                break
    if steeper:
        more = f" and {len(steeper) - 1} more" if len(steeper) > 1 else ""
        warnings.warn(
            f"layer {steeper[0]!r}{more}: every further sample costs more than the one before, "
            "for example because samples are multiplied with each other; "
            f"the counts for micro-batches of more than {larger} samples are too low",
            stacklevel=3,
        )
