"""Raise a bound by what memory allows, and by what no balance can do at once."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING

import torch

from torchgpipe.plan.bound import SAFE, Bound
from torchgpipe.plan.cuts import Path, cheapest, lightest
from torchgpipe.plan.trial import CLOSE, Trial

if TYPE_CHECKING:
    from torchgpipe.plan.balances import Balances

__all__ = ["Chain"]


class Chain:
    """The bound of one chain of tasks, for `n` partitions: raised by memory, and by what no balance can do at once."""

    def __init__(self, balances: Balances, bound: Bound, n: int, trial: Trial) -> None:
        self.balances, self.bound, self.n, self.trial = balances, bound, n, trial
        cuts = balances.needs.cuts
        self.forward, self.rest, self.both = balances.tables(bound)
        self.at, self.last = (torch.tensor([x[cut] for cut in cuts]) for x in (bound.copies, bound.last))
        self.least = bound.cheapest[n - 1] + bound.last[-2]
        """Of what comes on top of the largest seconds: copies, and the last partition's own."""

    def spend(self, times: int = 1) -> bool:
        """Count what it takes to find the best cuts; return whether there was so much effort left."""
        return self.balances.effort.spend(times * self.n * (3e-5 + 1.5e-9 * self.both.numel()))

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
        if not self.balances.every_cut:
            return (value + self.least) * SAFE  # which says nothing of the cuts that are left out
        forward, _ = lightest([self.forward] * self.n)
        rest, _ = lightest([self.rest] * self.n)

        def beside(most: float) -> float:
            return self._beside(most, self.trial.enough - forward)

        most = self.trial.enough - self.least - rest
        return max(value + self.least, self._split(forward, most, self.trial.enough, beside)) * SAFE

    def _beside(self, most: float, enough: float) -> float:
        """Return what no balance can beat beside its forward, if that takes at most so long; no more than is enough."""
        rest = self.rest.masked_fill(self.forward > most, inf)
        lowest, _ = lightest([rest] * self.n)

        def on_top(limit: float) -> float:
            found, path = cheapest(rest, self.n, limit, self.at, self.last)
            if found < inf:
                self.trial.take(self.balances.balance(path))
            return found

        return self._split(lowest, enough - self.least, enough, on_top)

    def _split(self, low: float, high: float, enough: float, beside: Callable[[float], float]) -> float:
        """Return a bound on the sum of a value from `low` on and of what is beside it: the less, the larger it may be.

        The interval where the sum may be the least is halved, until it is short. Above `high` the sum is enough.
        """
        if low >= high:
            return enough
        if high == inf:
            high = enough = 2 * low
        close = CLOSE / 2 * self.trial.limit if self.trial.limit < inf else CLOSE * low
        value = beside(high)
        heap = [(low + value, low, high, value)]
        while True:
            bound, low, high, value = heapq.heappop(heap)
            if high - low <= close or bound >= enough or not self.spend():
                return min(bound, enough)
            middle = (low + high) / 2
            heapq.heappush(heap, (middle + value, middle, high, value))
            value = beside(middle)
            heapq.heappush(heap, (low + value, low, middle, value))

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
