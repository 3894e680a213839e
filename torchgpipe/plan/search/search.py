"""Search balance x chunks x checkpoint x schedule for the shortest predicted step whose devices all have room.

For each number of micro-batches and each mode there is a lower bound on the step with any balance (`balances`). Those
with the lowest come first, and those whose bound is no better than the best setup so far are left out. The others begin
with a balance that evens out seconds, or bytes. Where it comes near the best, layers are moved across boundaries for as
long as the replay says that it helps (`trial`). Whatever is returned was replayed, in seconds and exactly in bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf

from torchgpipe.plan.count.optimizer import STATELESS, Optimizer
from torchgpipe.plan.predict import Predictor, Setup, micro_batch_sizes
from torchgpipe.plan.search.balances import Work, heaviest
from torchgpipe.plan.search.impossible import Impossible, least, why
from torchgpipe.plan.search.trial import MOST_TASKS, Candidate, Trial, assess
from torchgpipe.schedules import Schedule
from torchgpipe.tensors.checkpoint import MODES, Mode

BYTES = (0.5, 1.0)
"""The shares of bytes, beside seconds, in what balances even out where memory is scarce, and at the end."""
CLOSE = 1e-3
"""How far from its bound a setup may be for no better balance to be looked for."""
NEAR = 0.02
"""How much slower than the best so far the balance that a setup begins with may be for layers to be moved."""


@dataclass
class Found:
    """The best setup for a number of partitions, `None` if none fits, and the seconds that no such setup can beat."""

    best: Candidate | None = None
    bound: float = inf
    unlimited: float = inf
    """The seconds of the fastest setup, balanced by seconds, if memory had no limit."""

    @property
    def limit(self) -> float:
        """The seconds to beat."""
        return inf if self.best is None else self.best.seconds


def chunk_choices(batch_size: int) -> list[int]:
    """Return every number of micro-batches that has a micro-batch size of its own: at most two square roots' worth."""
    sizes = range(1, batch_size + 1)
    return sorted({len(micro_batch_sizes(batch_size, -(-batch_size // size))) for size in sizes})


def search(
    predictor: Predictor,
    *,
    batch_size: int,
    memory: float,
    partitions: Sequence[int],
    optimizer: Optimizer = STATELESS,
    chunks: Sequence[int] | None = None,
    checkpoint: Sequence[Mode] = MODES,
    schedules: Sequence[str | Schedule] = ("GPipe",),
    close: float = CLOSE,
) -> dict[int, Found]:
    """Return the best setup for each number of partitions; `memory` is each device's, in bytes, for tensors alone.

    No better one is looked for where one is as `close` to what none can beat: 0.01 is 1 %, infinity is any that fits.

    Raises:
        Impossible: none fits; the message says what is in the way.
    """
    base = Setup(batch_size, (len(predictor.counts),), optimizer=optimizer)
    found = {n: Found() for n in partitions}
    kept = sum(
        layer.parameters * (2 + optimizer.state) + layer.frozen for layer in predictor.counts.low
    )
    asked = []
    for m, mode, schedule in product(
        sorted(set(chunks or chunk_choices(batch_size))), checkpoint, schedules
    ):
        if mode == "except_last" and m == 1 and "never" in checkpoint:
            continue  # a single micro-batch: the same as never
        work = Work(predictor, replace(base, chunks=m, checkpoint=mode, schedule=schedule))
        fitting = [
            n
            for n in partitions
            if kept <= n * memory and 0 < work.stages(n) <= len(predictor.counts)
        ]
        asked += [(work.bound(n), n, work) for n in fitting]
    for lower, n, work in sorted(asked, key=lambda each: each[0]):
        if found[n].limit > lower * (1 + close) and (
            chunks or 3 * len(work.setup.sizes) * n <= MOST_TASKS
        ):
            lower = _try(found[n], n, work, memory, close)
        found[n].bound = min(found[n].bound, lower)
    if all(each.best is None for each in found.values()):
        n = max(partitions)
        numbers = sorted({*(chunks or (1, batch_size))})
        smallest = least(predictor, batch_size, n, optimizer, numbers, checkpoint, schedules)
        if smallest.peak > memory:
            raise Impossible(why(predictor, smallest, batch_size, n, memory))
        found[n].best = smallest
    for n, each in found.items():
        each.bound = min(each.bound, each.limit)
        if each.best is not None and each.limit > each.bound * (1 + close):
            work = Work(predictor, each.best.setup)
            for share in BYTES:  # from afar, moves may lead elsewhere
                first = assess(predictor, replace(work.setup, balance=work.balance(n, share)))
                _improve(each, Trial(work, first, memory), each.bound * (1 + close))
    return found


def _try(found: Found, n: int, work: Work, memory: float, close: float) -> float:
    """Look for a faster setup among the balances over `n` partitions; return what none that has room can beat."""
    setup = replace(work.setup, balance=work.balance(n, 0.0))
    step = work.predictor.step(setup)
    found.unlimited = min(found.unlimited, step.seconds)
    if heaviest(work.held, work.balance(n, 1.0)) > memory:
        return inf
    lower = work.bound(n, heaviest(work.seconds, setup.balance))
    trial = Trial(work, assess(work.predictor, setup, step), memory)
    if found.best is not None and len(found.best.setup.balance) == len(setup.balance):
        trial.take(found.best.setup.balance)
    for share in BYTES if trial.lacking else ():
        trial.take(work.balance(n, share))
    if trial.best.seconds < found.limit * (1 + NEAR):
        _improve(found, trial, lower * (1 + close))
    return lower


def _improve(found: Found, trial: Trial, enough: float) -> None:
    trial.improve(enough)
    if not trial.lacking and trial.best.seconds < found.limit:
        found.best = trial.best
