"""Search balance x chunks x checkpoint for the shortest predicted step whose devices all have room.

For each number of micro-batches and each mode there is a lower bound (`bound`) for any number of partitions. Those with
the lowest come first, and those whose bound is no better than the best setup so far are left out. For each of the
others balances are found (`balances`), and a bound that memory has raised. Then the lowest bounds are raised, until the
fastest setup is close to them (`branch`). Whatever is returned was replayed, in
seconds and exactly in bytes; nothing that was tried is faster, and nothing at all is faster than the bound.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

import torch

from torchgpipe.checkpoint import Mode, checkpointed
from torchgpipe.plan.balances import Balances, cuts_of
from torchgpipe.plan.bound import Bound, without_rest
from torchgpipe.plan.branch import raised
from torchgpipe.plan.impossible import Impossible, least, why
from torchgpipe.plan.needs import Needs
from torchgpipe.plan.optimizer import STATELESS, Optimizer
from torchgpipe.plan.predict import Predictor, Setup, micro_batch_sizes
from torchgpipe.plan.trial import CLOSE, Candidate, Effort, Trial, assess

__all__ = ["MODES", "Found", "chunk_choices", "search"]

MODES: tuple[Mode, ...] = ("never", "except_last", "always")
MOST_EVENTS = 200_000
"""Tasks that a replay of a candidate may have; with more micro-batches than that, one is tried where no other fits."""
BRANCHING = 6.0
"""About how many seconds a search takes at most for branching."""
ROUGHLY = 0.01
"""How close to the fastest setup all bounds are raised, before any is raised further."""


@dataclass
class Found:
    """The best setup for a number of partitions, `None` if none fits, and the seconds that no such setup can beat."""

    best: Candidate | None = None
    bound: float = inf
    free: float = inf
    """The seconds of the fastest that was tried, whether it fits or not."""

    @property
    def limit(self) -> float:
        """The seconds to beat."""
        return inf if self.best is None else self.best.seconds


def chunk_choices(batch_size: int, partitions: int) -> list[int]:
    """Return every number of micro-batches that has a micro-batch size of its own: at most two square roots' worth.

    Those with more than `MOST_EVENTS` tasks are left out.
    """
    return [m for m in _every_choice(batch_size) if 3 * m * partitions <= MOST_EVENTS]


def _every_choice(batch_size: int) -> list[int]:
    by_size = {size: len(micro_batch_sizes(batch_size, -(-batch_size // size))) for size in range(1, batch_size + 1)}
    return sorted(set(by_size.values()))


def search(
    predictor: Predictor,
    *,
    batch_size: int,
    memory: float,
    partitions: Sequence[int],
    optimizer: Optimizer = STATELESS,
    chunks: Sequence[int] | None = None,
    checkpoint: Sequence[Mode] = MODES,
    close: float = CLOSE,
) -> dict[int, Found]:
    """Return the best setup for each number of partitions; `memory` is each device's, in bytes, for tensors alone.

    No better one is looked for where one is as `close` to what none can beat: 0.01 is 1 %, infinity is any that fits.

    Raises:
        Impossible: none fits; the message says what is in the way.
    """
    base = Setup(batch_size, (len(predictor.counts),), optimizer=optimizer)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tables are small, and threads only wait for each other
    try:
        return _search(predictor, base, memory, list(partitions), chunks, checkpoint, close)
    finally:
        torch.set_num_threads(threads)


def _search(
    predictor: Predictor,
    base: Setup,
    memory: float,
    partitions: list[int],
    chunks: Sequence[int] | None,
    checkpoint: Sequence[Mode],
    close: float,
) -> dict[int, Found]:
    cuts, batch_size, optimizer = cuts_of(len(predictor.counts)), base.batch_size, base.optimizer
    needs = functools.lru_cache(3)(lambda size: Needs(predictor.counts, size, cuts))
    effort = Effort()
    asked = []
    for m in sorted(set(chunks or _every_choice(batch_size))):
        for mode in checkpoint:
            if mode == "except_last" and checkpointed(mode, m) == 0 and "never" in checkpoint:
                continue  # a single micro-batch: the same as never
            balances = Balances(predictor, replace(base, chunks=m, checkpoint=mode), memory, needs, effort, close)
            rough = Bound(predictor, without_rest(balances.setup))
            asked.append((balances, {n: rough.lightest(n) for n in partitions}))
    lowest = {n: min(bounds[n] for _, bounds in asked) for n in partitions}
    asked.sort(key=lambda each: min(each[1][n] / lowest[n] for n in partitions))
    found = {n: Found() for n in partitions}
    kept = sum(layer.parameters * (2 + optimizer.state) + layer.frozen for layer in predictor.counts.low)
    enough = [n for n in partitions if kept <= n * memory]
    lowers: dict[tuple[int, Setup], float] = {}
    while asked:
        balances, bounds = asked.pop(0)  # it holds much
        m = balances.setup.chunks
        for n in sorted(enough, key=lowest.__getitem__):  # the fastest first: no other bound has to be above it
            each, lower = found[n], bounds[n]
            if lower < each.limit and (chunks or 3 * m * n <= MOST_EVENTS):
                best, lower = balances.best(n, each.limit)
                each.best = best or each.best
                each.free = min(each.free, balances.free.get(n, inf))
            lowers[n, balances.setup] = lower
    if all(each.best is None for each in found.values()):
        n = max(partitions)
        found[n].best = _last(predictor, batch_size, n, memory, optimizer, chunks, checkpoint)
    for n, each in found.items():
        lower = min([each.limit, *(lower for (k, _), lower in lowers.items() if k == n)])
        if each.best is not None and each.limit > lower * (1 + close):
            each.best = Balances(predictor, each.best.setup, memory, needs, Effort(1)).improved(each.best)
    if lowers and len(cuts) == len(predictor.counts) + 1:
        effort = Effort(BRANCHING)
        for near in (ROUGHLY, close):
            _branch(found, lowers, lambda setup: Balances(predictor, setup, memory, needs, effort), max(near, close))
    for n, each in found.items():
        each.bound = min([each.limit, *(lower for (k, _), lower in lowers.items() if k == n)])
    return found


def _branch(
    found: dict[int, Found], lowers: dict[tuple[int, Setup], float], of: Callable[[Setup], Balances], close: float
) -> None:
    """Raise the lowest bounds, until the fastest setup is close to them, or for as long as the effort allows."""
    while True:
        n, setup = min(lowers, key=lowers.__getitem__)
        lower, fastest = lowers[n, setup], min(each.limit for each in found.values())
        if fastest <= lower * (1 + close) * (1 + 1e-9):
            return
        each, target = found[n], fastest / (1 + close)
        trial = Trial(of(setup), each.limit)
        lowers[n, setup] = raised(n, trial, lower, target)
        if trial.best is not None:
            trial.improve()
            each.best = trial.best
        if lowers[n, setup] < target:
            return


def _last(
    predictor: Predictor,
    batch_size: int,
    n: int,
    memory: float,
    optimizer: Optimizer,
    chunks: Sequence[int] | None,
    checkpoint: Sequence[Mode],
) -> Candidate:
    """Return a setup balanced by parameters: one micro-batch, the smallest ones, and whatever was left out above."""
    tried = sorted(chunks or {1, batch_size, *_every_choice(batch_size)} - {*chunk_choices(batch_size, n)[1:-1]})
    smallest_of = [least(predictor, batch_size, n, optimizer, [m], checkpoint) for m in tried]
    fitting = next((x for x in smallest_of if x.peak <= memory), None)
    if fitting is None:
        allowed = min(smallest_of, key=lambda x: x.peak)
        raise Impossible(why(predictor, allowed, batch_size, n, memory))
    return assess(predictor, fitting.setup)
