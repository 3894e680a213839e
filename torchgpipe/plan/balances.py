"""Find the best balance for given micro-batches and checkpoint mode, and what no balance can beat."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf

import torch
from torch import Tensor

from torchgpipe.balance.minimise import minimise_heaviest
from torchgpipe.checkpoint import checkpointed
from torchgpipe.plan.bound import Bound
from torchgpipe.plan.chain import Chain
from torchgpipe.plan.cuts import Path, lightest
from torchgpipe.plan.memory import alone_memory, setup_memory
from torchgpipe.plan.needs import Needs
from torchgpipe.plan.predict import Predictor, Setup
from torchgpipe.plan.trial import CLOSE, Candidate, Effort, Trial

__all__ = ["Balances", "cuts_of"]

MOST_CUTS = 1000
"""Cuts that balances are made of; models with more layers are cut at so many places, evenly spread."""
CORRECTED = 8
"""How often a balance that has no room is looked for again, by what its partitions turned out to need."""


def cuts_of(layers: int) -> list[int]:
    """Return where a model may be cut, its ends included: before every layer, unless there are very many."""
    count = min(layers, MOST_CUTS)
    return sorted({layers * k // count for k in range(count + 1)})


class Balances:
    """All balances of a model for the micro-batches and the checkpoint mode of `setup`, with room in `memory`."""

    def __init__(
        self,
        predictor: Predictor,
        setup: Setup,
        memory: float,
        needs: Callable[[int], Needs],
        effort: Effort,
        close: float = CLOSE,
    ) -> None:
        self.predictor, self.setup, self.memory = predictor, setup, memory
        self.effort, self.close = effort, close
        self._needs = needs
        self.free: dict[int, float] = {}
        """The seconds of the fastest plain balance, whether it fits or not."""
        self._tables: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._left_out: list[tuple[int, int]] = []
        self._roomy: dict[tuple[int, int], bool] = {}

    @functools.cached_property
    def bounds(self) -> list[Bound]:
        """What partitions take at the least, by either chain of tasks."""
        both = len(self.setup.sizes) > 1
        return [Bound(self.predictor, self.setup, early=early) for early in ((False, True) if both else (False,))]

    @functools.cached_property
    def needs(self) -> Needs:
        """What partitions need at the least."""
        return self._needs(self.setup.sizes[0])

    @functools.cached_property
    def bytes(self) -> Tensor:
        """The least bytes of every partition, from one cut to another."""
        return self.needs.at_least(self.setup)

    def tables(self, bound: Bound) -> tuple[Tensor, Tensor, Tensor]:
        """Return the bound's seconds of every partition, infinite where it has no room: forward, the rest, and both."""
        if id(bound) not in self._tables:
            none = (self.bytes > self.memory) | torch.ones_like(self.bytes, dtype=torch.bool).tril()
            forward, rest = (part.masked_fill_(none, inf) for part in bound.parts(self.needs.cuts))
            for a, b in self._left_out:
                forward[a, b] = inf
            self._tables[id(bound)] = forward, rest, forward + rest
        return self._tables[id(bound)]

    def leave_out(self, a: int, b: int) -> None:
        """Note that the partition from one cut to another has no room."""
        self._left_out.append((a, b))
        for tables in self._tables.values():
            for table in tables:
                table[a, b] = inf

    def best(self, n: int, limit: float) -> tuple[Candidate | None, float]:
        """Return the best setup with `n` partitions, if it is below the limit, and the seconds that none can beat."""
        lower = max(bound.lightest(n) for bound in self.bounds)
        if lower >= limit:
            return None, lower
        trial = Trial(self, limit, self.close)
        plain = sorted(self._plain(n))
        for balance in plain:
            trial.take(balance)
        self.free[n] = trial.free
        if trial.reached(lower):
            return trial.best, lower
        # The chain that is longer with a balance that is not too bad.
        like = plain[0] if trial.best is None else trial.best.setup.balance
        chain = Chain(self, max(self.bounds, key=lambda bound: bound.of(like)), n, trial)
        raised = chain.bound_with_memory()
        if self.every_cut:
            lower = max(lower, raised)
        if not trial.reached(lower) and raised < trial.limit:
            self._correct(chain, n, trial)
        if trial.best is not None and not trial.reached(lower):
            trial.improve()
        return trial.best, lower

    def improved(self, best: Candidate) -> Candidate:
        """Return a setup with other cuts, near those of the one that is given, if it is faster."""
        trial = Trial(self, best.seconds)
        trial.best = best
        trial.improve()
        return trial.best

    def _plain(self, n: int) -> set[tuple[int, ...]]:
        """Return balances by time, of forward and backward and of all that is done; by layers, and by parameters."""
        predictor, layers = self.predictor, len(self.predictor.counts)
        seconds = predictor.layers(self.setup.sizes[0])
        m = len(self.setup.sizes)
        share = checkpointed(self.setup.checkpoint, m) / m
        parts = zip(seconds.forward, seconds.graph, seconds.backward, seconds.accumulate, strict=True)
        everything = [f * share + g + b + a for f, g, b, a in parts]
        plain = [f + b for f, b in zip(seconds.graph, seconds.backward, strict=True)]
        weights = [layer.parameters for layer in seconds.layers]
        kinds = (tuple(costs) for costs in (plain, everything, [1] * layers, weights))
        return {_balanced(costs, n) for costs in kinds}

    @property
    def every_cut(self) -> bool:
        """Whether no place to cut is left out."""
        return len(self.needs.cuts) == len(self.predictor.counts) + 1

    def has_room(self, a: int, b: int) -> bool:
        """Return whether the partition from one cut to another has room; if there is no effort left, it may have."""
        if (a, b) not in self._roomy:
            start, stop = self.needs.cuts[a], self.needs.cuts[b]
            if not self.effort.spend(1e-4 + 2e-5 * (stop - start)):
                return True
            found = alone_memory(self.predictor.counts, self.setup, start, stop)
            self._roomy[a, b] = found.peak <= self.memory
        return self._roomy[a, b]

    def _correct(self, chain: Chain, n: int, trial: Trial) -> None:
        """Try balances with less room for those partitions that turn out to need more, until one fits."""
        off = [0.0] * n
        for _ in range(CORRECTED):
            if not chain.spend() and trial.best is not None:
                return
            tables = [chain.both.masked_fill(self.bytes > self.memory - x, inf) if x else chain.both for x in off]
            value, path = lightest(tables, trial.limit)
            if value >= trial.limit:
                return
            balance = self.balance(path)
            trial.take(balance)
            peaks = [device.peak for device in setup_memory(self.predictor.counts, self.of(balance))]
            if max(peaks) <= self.memory:
                return
            for j, (a, b) in enumerate(pairwise(path)):
                if peaks[j] > self.memory:
                    off[j] = max(off[j] + 1e-3 * self.memory, peaks[j] - float(self.bytes[a, b]))

    def heavy(self, setup: Setup) -> bool:
        """Return whether parameters alone, with gradients and the optimizer's state, have no room on some device."""
        each = 2 + setup.optimizer.state
        weights = ([layer.parameters for layer in self.predictor.counts.low[a:b]] for a, b in setup.cuts)
        return max(map(sum, weights)) * each > self.memory

    def of(self, balance: Sequence[int]) -> Setup:
        """Return the setup with this balance."""
        return replace(self.setup, balance=tuple(balance))

    def balance(self, path: Path) -> tuple[int, ...]:
        """Return the layers of each partition on a path of cuts."""
        return tuple(self.needs.cuts[b] - self.needs.cuts[a] for a, b in pairwise(path))


@functools.lru_cache(128)
def _balanced(costs: tuple[float, ...], n: int) -> tuple[int, ...]:
    return tuple(minimise_heaviest(costs, n))
