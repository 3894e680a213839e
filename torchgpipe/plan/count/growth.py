"""Compute a layer's cost for any micro-batch size as a linear function, from two known costs.

The linear function is the straight line through the two costs. This is wrong for an operator
that multiplies samples with each other: with twice the samples, it costs more than twice as much.
Such an operator can be recognized: the line through its costs for the two sizes is so steep that it
gives a negative cost for zero samples.
"""

import warnings
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from torchgpipe.plan.count.footprint import LayerCount

KIND = attrgetter("kind", "dtype")
"""The attributes of an operator that are equal for all micro-batch sizes."""


def between(a: Any, b: Any, share: float, known: dict[tuple[int, int], Any]) -> Any:
    """Return the point `a + (b - a) * share` on the line through two costs.

    Args:
        a: The cost if `share` is 0: a float, or nested tuples of floats and other values.
        b: The cost if `share` is 1, nested like `a`.
        share: The position on the line. It is below 0 or above 1 for points beyond `a` and `b`.
        known: A cache, which maps the ids of `a` and `b` to the result. The cache saves time,
            because layers that behave alike have the same tuples.

    Returns:
        The cost, nested like `a`. Each float in it is computed on its own.

    Raises:
        ValueError: If `a` and `b` differ in anything but floats.
    """
    if isinstance(a, float):
        return a + (b - a) * share
    if not isinstance(a, tuple) or len(a) != len(b):
        if a != b:
            raise ValueError(
                f"a layer behaves differently for other batch sizes, so its cost cannot be "
                f"computed: it has {a!r} for one size, but {b!r} for another"
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
    """Check that the cost of each layer grows linearly with the micro-batch size.

    Args:
        low: The counts of the layers for micro-batches of the smaller size.
        high: The counts of the layers for micro-batches of the larger size.
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
