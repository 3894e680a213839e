"""Search balance x chunks x checkpoint for the shortest predicted step whose devices all have room.

For each number of micro-batches and each mode there is a lower bound on the step with any balance (`balances`). Those
with the lowest come first, and those whose bound is no better than the best setup so far are left out. The others begin
with balances that share out seconds, or bytes. Where these come near the best, layers are moved across boundaries for
as long as the replay says that it helps (`trial`). Whatever is returned was replayed, in seconds and exactly in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from torchgpipe.checkpoint import Mode, checkpointed
from torchgpipe.plan.balances import Work
from torchgpipe.plan.impossible import Impossible, least, why
from torchgpipe.plan.optimizer import STATELESS, Optimizer
from torchgpipe.plan.predict import Predictor, Setup, micro_batch_sizes
from torchgpipe.plan.trial import Candidate, Trial, assess

__all__ = ["MODES", "Found", "chunk_choices", "search"]

MODES: tuple[Mode, ...] = ("never", "except_last", "always")
MOST_EVENTS = 200_000
"""Tasks that a replay of a candidate may have; with more micro-batches than that, one is tried where no other fits."""
CLOSE = 1e-3
"""How far from its bound a setup may be for no better balance to be looked for."""
NEAR = 0.05
"""How much slower than the best so far the balances that a setup begins with may be for layers to be moved."""


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
    found = {n: Found() for n in partitions}
    kept = sum(layer.parameters * (2 + optimizer.state) + layer.frozen for layer in predictor.counts.low)
    asked = []
    for m in sorted(set(chunks or _every_choice(batch_size))):
        for mode in checkpoint:
            if mode == "except_last" and checkpointed(mode, m) == 0 and "never" in checkpoint:
                continue  # a single micro-batch: the same as never
            work = Work(predictor, replace(base, chunks=m, checkpoint=mode))
            asked += [(work.bound(n), n, work) for n in partitions if kept <= n * memory]
    for lower, n, work in sorted(asked, key=lambda each: each[0]):
        left_out = not chunks and 3 * len(work.setup.sizes) * n > MOST_EVENTS
        if left_out or _try(found[n], lower, n, work, memory, close):
            found[n].bound = min(found[n].bound, lower)
    if all(each.best is None for each in found.values()):
        n = max(partitions)
        found[n].best = _last(predictor, batch_size, n, memory, optimizer, chunks, checkpoint)
    for each in found.values():
        each.bound = min(each.bound, each.limit)
    return found


def _try(found: Found, lower: float, n: int, work: Work, memory: float, close: float) -> bool:
    """Look for a faster setup among the balances over `n` partitions; return whether any may have room."""
    if found.best is not None and found.limit <= lower * (1 + close):
        return True
    first, *others = work.even(n)
    if work.least(memory) > n:
        found.free = min(found.free, work.predictor.step(replace(work.setup, balance=first)).seconds)
        return False
    trial = Trial(work, first, memory)
    if found.best is not None:
        others.append(found.best.setup.balance)
    for balance in others:
        trial.take(balance)
    if trial.lacking:
        for balance in work.mixed(n):
            trial.take(balance)
    if trial.best.seconds < found.limit * (1 + NEAR):
        trial.improve(lower * (1 + close))
    found.free = min(found.free, trial.fastest)
    if not trial.lacking and trial.best.seconds < found.limit:
        found.best = trial.best
    return True


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
