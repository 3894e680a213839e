"""Raise a bound by what memory allows."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING

from torchgpipe.plan.bound import SAFE, Bound
from torchgpipe.plan.cuts import Path, lightest
from torchgpipe.plan.trial import Trial

if TYPE_CHECKING:
    from torchgpipe.plan.balances import Balances

__all__ = ["Chain"]


class Chain:
    """The bound of one chain of tasks, for `n` partitions, raised by memory."""

    def __init__(self, balances: Balances, bound: Bound, n: int, trial: Trial) -> None:
        self.balances, self.bound, self.n, self.trial = balances, bound, n, trial
        *_, self.both = balances.tables(bound)
        self.least = bound.cheapest[n - 1] + bound.last[-2]
        """Of what comes on top of the largest seconds: copies, and the last partition's own."""

    def spend(self) -> bool:
        """Count what it takes to find the best cuts; return whether there was so much effort left."""
        return self.balances.effort.spend(self.n * (3e-5 + 1.5e-9 * self.both.numel()))

    def bound_with_memory(self) -> float:
        """Return the seconds that no balance with room in the memory can beat, or more than the limit.

        As far as the effort allows. The balances on the way are tried.
        """
        while True:
            value, path = lightest([self.both] * self.n, self.trial.limit)
            if value + self.least >= self.trial.limit:
                return (value + self.least) * SAFE
            if not (self.spend() and self._drop(path)):
                break
        self.trial.take(self.balances.balance(path))
        return (value + self.least) * SAFE

    def _drop(self, path: Path) -> bool:
        """Leave out partitions of these cuts that have no room, and such neighbours; return whether there were any."""
        dropped = False
        for a, b in pairwise(path):
            if not self.balances.has_room(a, b):
                dropped = True
                self.balances.leave_out(a, b)
                self._drop_next((a, stop) for stop in range(b + 1, len(self.both)))
                self._drop_next((start, b) for start in range(a - 1, -1, -1))
        return dropped

    def _drop_next(self, partitions: Iterable[tuple[int, int]]) -> None:
        """Leave partitions out up to the first that has room, or is left out already."""
        for a, b in partitions:
            if self.both[a, b] == inf or self.balances.has_room(a, b):
                return
            self.balances.leave_out(a, b)
