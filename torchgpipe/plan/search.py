"""Search balance x chunks x checkpoint for the shortest predicted step whose devices all have room.

For each number of micro-batches and each checkpoint mode, the heaviest partition is made as light as memory allows:
bounds are bisected, and partitions filled greedily up to a bound in seconds and one in bytes. The bytes in there are
estimates in closed form; what is returned was replayed, in seconds and exactly in bytes, and the best were improved
by moving their cuts. So nothing that was tried is faster, and the plain balance by time was tried with every m.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchgpipe.balance.minimise import minimise_heaviest
from torchgpipe.checkpoint import Mode, checkpointed
from torchgpipe.plan.fill import Estimate, fill, layer_seconds, relieve, smallest
from torchgpipe.plan.impossible import Impossible, hopeless, least, why
from torchgpipe.plan.memory import Device, setup_memory
from torchgpipe.plan.optimizer import STATELESS, Optimizer
from torchgpipe.plan.predict import Predictor, Setup, micro_batch_sizes

__all__ = ["MODES", "Candidate", "assess", "chunk_choices", "search"]

MODES: tuple[Mode, ...] = ("never", "except_last", "always")
MOST_EVENTS = 200_000
"""Tasks that a replay of a candidate may have; with more micro-batches than that, one is tried where no other fits."""
WANTED = 4
"""How many setups to return, by default."""
IMPROVED = 2
"""How many of the best have their cuts moved."""
TIGHTER = 4
"""How often the bound in bytes is tightened where the estimate was too low."""


@dataclass(frozen=True)
class Candidate:
    """A setup with what is predicted for it: seconds, bubble, and every device's memory."""

    setup: Setup
    seconds: float
    bubble: float
    devices: tuple[Device, ...]

    @property
    def peak(self) -> float:
        """Bytes of the device that needs the most."""
        return max(device.peak for device in self.devices)


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
    devices: int,
    memory: float,
    optimizer: Optimizer = STATELESS,
    chunks: Sequence[int] | None = None,
    checkpoint: Sequence[Mode] = MODES,
    partitions: Sequence[int] | None = None,
    wanted: int = WANTED,
) -> list[Candidate]:
    """Return the setups that fit, the fastest first, one for each number of partitions, micro-batches and mode.

    `memory` is each device's, in bytes, for tensors alone.

    Raises:
        Impossible: none fits; the message says what is in the way.
    """
    layers = len(predictor.counts)
    most = min(devices, layers)
    counts = partitions or sorted({n for n in (1, 2, 4, 8, 16, 32, 64, most) if n <= most})
    if (reason := hopeless(predictor, batch_size, devices, memory, optimizer)) is not None:
        raise Impossible(reason)
    drafts: list[Setup] = []
    balanced = functools.cache(lambda n, costs: tuple(minimise_heaviest(costs, n)))
    for n in counts:
        for m in chunks or chunk_choices(batch_size, n):
            for mode in checkpoint:
                if mode == "except_last" and checkpointed(mode, m) == 0 and "never" in checkpoint:
                    continue  # a single micro-batch: the same as never
                setup = Setup(batch_size, (layers,), m, mode, optimizer)
                # Balanced by forward and backward alone, and by all that they do.
                both = {balanced(n, costs) for costs in (_plain(predictor, setup), layer_seconds(predictor, setup))}
                drafts += [replace(setup, balance=balance) for balance in sorted(both)]

    # The fastest first; what does not fit comes back with another balance, and then comes in its turn again.
    queue = [(predictor.step(setup).seconds, order, setup) for order, setup in enumerate(drafts)]
    heapq.heapify(queue)
    filled: dict[tuple[int, int, Mode], int] = {}
    found: dict[tuple[int, int, Mode], Candidate] = {}
    while queue and len(found) < wanted:
        _, order, setup = heapq.heappop(queue)
        kind = (len(setup.balance), setup.chunks, setup.checkpoint)
        if kind in found:
            continue
        candidate = assess(predictor, setup)
        if candidate.peak <= memory:
            if len(found) < min(IMPROVED, wanted - 1):
                candidate = _improve(predictor, candidate, memory)
            found[kind] = candidate
        elif filled.get(kind, 0) < TIGHTER:
            # What this balance needs, estimated and exactly, says how far the estimate is off.
            estimate = Estimate(predictor, setup)
            off = estimate.peak(setup.balance) / candidate.peak
            filled[kind] = filled.get(kind, 0) + 1
            room = memory * off * 0.99 ** (filled[kind] - 1)
            balance = fill(predictor, setup, estimate, room)
            if balance is None:
                filled[kind] = TIGHTER
                balance = smallest(predictor, setup, estimate)
                if balance is not None:
                    balance = relieve(predictor, replace(setup, balance=balance), memory)
            if balance is not None:
                other = replace(setup, balance=balance)
                heapq.heappush(queue, (predictor.step(other).seconds, order, other))
    if not found:
        # At last, balanced by parameters: one micro-batch, the smallest ones, and whatever was left out above.
        n = max(counts)
        tried = sorted(chunks or {1, batch_size, *_every_choice(batch_size)} - {*chunk_choices(batch_size, n)[1:-1]})
        smallest_of = [least(predictor, batch_size, n, optimizer, [m], checkpoint) for m in tried]
        fitting = next((x for x in smallest_of if x.peak <= memory), None)
        if fitting is None:
            allowed = min(smallest_of, key=lambda x: x.peak)
            raise Impossible(why(predictor, allowed, batch_size, devices, memory))
        return [assess(predictor, fitting.setup)]
    return sorted(found.values(), key=lambda c: c.seconds)


def assess(predictor: Predictor, setup: Setup) -> Candidate:
    """Predict a setup."""
    step = predictor.step(setup)
    return Candidate(setup, step.seconds, step.bubble, tuple(setup_memory(predictor.counts, setup)))


def _plain(predictor: Predictor, setup: Setup) -> tuple[float, ...]:
    """Return the seconds of each layer's forward and backward, as `balance_by_time` counts them."""
    seconds = predictor.layers(setup.sizes[0])
    return tuple(f + b for f, b in zip(seconds.graph, seconds.backward, strict=True))


def _improve(predictor: Predictor, candidate: Candidate, memory: float) -> Candidate:
    """Move cuts, by ever smaller steps, for as long as the step gets shorter."""
    balance = list(candidate.setup.balance)
    stride = max(1, sum(balance) // (8 * len(balance)))
    while stride:
        better = None
        for j in range(len(balance) - 1):
            for change in (-stride, stride):
                moved = list(balance)
                moved[j] += change
                moved[j + 1] -= change
                if min(moved[j], moved[j + 1]) < 1:
                    continue
                setup = replace(candidate.setup, balance=tuple(moved))
                if predictor.step(setup).seconds < (better or candidate).seconds * (1 - 1e-6):
                    tried = assess(predictor, setup)
                    if tried.peak <= memory:
                        better = tried
        if better is None:
            stride //= 2
        else:
            candidate, balance = better, list(better.setup.balance)
    return candidate
