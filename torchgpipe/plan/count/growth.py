"""Work out from two sizes of micro-batches what others cost, by a straight line, and check that there is one.

An operator that does more than twice as much for twice the samples would, on such a line, do less than nothing for
none: it multiplies samples with each other.
"""

import warnings
from collections.abc import Sequence
from typing import Any

from torchgpipe.plan.count.footprint import LayerCount


def between(a: Any, b: Any, share: float, known: dict[tuple[int, int], Any]) -> Any:
    """Return what lies on the straight line from `a` to `b`, beyond them where the share is above 1: all floats in it.

    `known` has the tuples that were met, by their ids: layers that behave alike share them.

    Raises:
        ValueError: they differ in anything else.
    """
    if isinstance(a, float):
        return a + (b - a) * share
    if not isinstance(a, tuple) or len(a) != len(b):
        if a != b:
            raise ValueError(
                f"a layer differs for different batch sizes by more than its size: {a!r}, {b!r}"
            )
        return a
    if (id(a), id(b)) not in known:
        items = [between(x, y, share, known) for x, y in zip(a, b, strict=True)]
        known[id(a), id(b)] = type(a)(*items) if hasattr(a, "_fields") else tuple(items)
    return known[id(a), id(b)]


def check_growth(
    low: Sequence[LayerCount], high: Sequence[LayerCount], sizes: tuple[int, int]
) -> None:
    """Compare layers as counted for micro-batches of two `sizes`, the smaller first.

    Raises:
        ValueError: a layer runs different operators for them.

    Warns:
        UserWarning: an operator does more for every further sample, so that larger micro-batches are counted too low.
    """
    steeper = []
    for a, b in zip(low, high, strict=True):
        first, second = ((*x.forward, *x.backward) for x in (a, b))
        if [(o.kind, o.dtype) for o in first] != [(o.kind, o.dtype) for o in second]:
            raise ValueError(
                f"layer {a.name!r} runs different operators for micro-batches of {sizes[0]} and of {sizes[1]} samples, "
                "so its cost cannot be worked out for others"
            )
        for_none = between(first, second, sizes[0] / (sizes[0] - sizes[1]), {})
        steeper += [a.name] if any(o.flops < 0 or o.bytes < 0 for o in for_none) else []
    if steeper:
        more = f" and {len(steeper) - 1} more" if len(steeper) > 1 else ""
        warnings.warn(
            f"layer {steeper[0]!r}{more}: every further sample costs more than the one before, as where samples are "
            f"multiplied with each other; micro-batches of more than {sizes[1]} samples are counted too low",
            stacklevel=3,
        )
