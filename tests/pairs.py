"""Choose a few of a test's combinations of parameters, such that every pair of values is among them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations
from random import Random
from typing import Any


def covering(rows: Sequence[Mapping[Any, Hashable]]) -> set[int]:
    """Return the indices of some rows in which all pairs of values are that any row has.

    The most new pairs come first. Ties are drawn, the same in every run, or whatever varies slowest would always be
    combined with the first of all others.
    """
    order = Random(0).sample(range(len(rows)), len(rows))
    pairs = {k: {*combinations(rows[k].items(), 2)} for k in order}
    missing = set().union(*pairs.values())
    chosen: set[int] = set()
    while missing:
        best = max(order, key=lambda k: len(pairs[k] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return chosen
