"""Compute the cost of any micro-batch size from the costs of two sizes, on a straight line.

The cost of an operator that multiplies samples with each other is not on a straight line. With
twice the samples, the operator costs more than twice as much. The straight line through both sizes
then gives a negative cost for zero samples, which shows that there is such an operator.
"""

import warnings
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from torchgpipe.plan.count.footprint import LayerCount

KIND = attrgetter("kind", "dtype")
"""The attributes of an operator that are equal for all micro-batch sizes."""


def between(a: Any, b: Any, share: float, known: dict[tuple[int, int], Any]) -> Any:
    """Return the point on the straight line from `a` to `b`, for all floats within nested tuples.

    Args:
        a: The point at which `share` is 0.
        b: The point at which `share` is 1.
        share: The position on the line. Numbers above 1 and below 0 are beyond `a` and `b`.
        known: A cache of the results for pairs of tuples, by their ids. Layers that behave alike
            share their tuples.

    Raises:
        ValueError: If `a` and `b` differ in anything but floats.
    """
    if isinstance(a, float):
        return a + (b - a) * share
    if not isinstance(a, tuple) or len(a) != len(b):
        if a != b:
            raise ValueError(
                f"a layer does something else for another batch size: {a!r} and {b!r} differ"
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
            "as where samples are multiplied with each other; "
            f"micro-batches of more than {larger} samples are counted too low",
            stacklevel=3,
        )
