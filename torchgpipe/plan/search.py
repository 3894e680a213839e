"""Search balance x chunks x checkpoint for the shortest predicted step whose devices all have room.

For each number of micro-batches and each checkpoint mode, the heaviest partition is made as light as memory allows:
bounds are bisected, and partitions filled greedily up to a bound in seconds and one in bytes. The bytes in there are
estimates in closed form; what is returned was replayed, in seconds and exactly in bytes, and the best were improved
by moving their cuts. So nothing that was tried is faster, and the plain balance by time was tried with every m.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from torchgpipe.balance.minimise import minimise_heaviest
from torchgpipe.checkpoint import Mode, checkpointed
from torchgpipe.plan.memory import Device, setup_memory, task_bytes
from torchgpipe.plan.predict import Predictor, Setup, micro_batch_sizes

__all__ = ["Candidate", "Impossible", "assess", "chunk_choices", "search"]

MODES: tuple[Mode, ...] = ("never", "except_last", "always")
MOST_EVENTS = 200_000
"""Tasks that a replay of a candidate may have; setups with more micro-batches than that are not considered."""
WANTED = 4
"""How many setups to return, by default."""
IMPROVED = 2
"""How many of the best have their cuts moved."""
TIGHTER = 4
"""How often the bound in bytes is tightened where the estimate was too low."""


class Impossible(ValueError):
    """Tell in one line why no setup fits."""


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
    """Return numbers of micro-batches worth trying: about two for each doubling, each with its own micro-batch size."""
    choices = {1, batch_size}
    m = 1.0
    while m < batch_size:
        choices.add(round(m))
        m *= 2**0.5
    by_size = {}
    for m in sorted(choices):
        sizes = micro_batch_sizes(batch_size, int(m))
        by_size[sizes[0]] = len(sizes)
    return [m for m in sorted(by_size.values()) if 3 * m * partitions <= MOST_EVENTS]


def search(
    predictor: Predictor,
    *,
    batch_size: int,
    devices: int,
    memory: float,
    state: int = 0,
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
    counts = partitions or sorted({n for n in (1, 2, 4, 8, 16, 32, 64, devices) if n <= min(devices, layers)})
    if (reason := _hopeless(predictor, devices, memory, state)) is not None:
        raise Impossible(reason)
    drafts: list[tuple[float, int, Setup]] = []
    for n in counts:
        for m in chunks or chunk_choices(batch_size, n):
            for mode in checkpoint:
                if mode == "except_last" and checkpointed(mode, m) == 0 and "never" in checkpoint:
                    continue  # a single micro-batch: the same as never
                setup = Setup(batch_size, (layers,), m, mode, state)
                drafts += [(predictor.step(s).seconds, 0, s) for s in _balanced(predictor, setup, n)]

    # The fastest first; what does not fit comes back with another balance, and then comes in its turn again.
    queue = [(seconds, order, setup) for order, (seconds, _, setup) in enumerate(drafts)]
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
            estimate = _Estimate(predictor, setup)
            off = estimate.peak(setup.balance) / candidate.peak
            filled[kind] = filled.get(kind, 0) + 1
            room = memory * off * 0.99 ** (filled[kind] - 1)
            balance = _fill(predictor, setup, estimate, room)
            if balance is None:
                filled[kind] = TIGHTER
                balance = _smallest(predictor, setup, estimate)
                if balance is not None:
                    balance = _relieve(predictor, replace(setup, balance=balance), memory)
            if balance is not None:
                other = replace(setup, balance=balance)
                heapq.heappush(queue, (predictor.step(other).seconds, order, other))
    if not found:
        raise Impossible(_why(predictor, batch_size, devices, memory, state))
    return sorted(found.values(), key=lambda c: c.seconds)


def assess(predictor: Predictor, setup: Setup) -> Candidate:
    """Predict a setup."""
    step = predictor.step(setup)
    return Candidate(setup, step.seconds, step.bubble, tuple(setup_memory(predictor.counts, setup)))


def _balanced(predictor: Predictor, setup: Setup, n: int) -> list[Setup]:
    """Return the setup balanced over `n` partitions: by forward and backward alone, and by all that they do."""
    seconds = predictor.layers(setup.sizes[0])
    plain = [f + b for f, b in zip(seconds.forward, seconds.backward, strict=True)]
    balances = {tuple(minimise_heaviest(costs, n)) for costs in (plain, _weights(predictor, setup))}
    return [replace(setup, balance=balance) for balance in sorted(balances)]


def _weights(predictor: Predictor, setup: Setup) -> list[float]:
    """Return the seconds that each layer takes for a micro-batch, recomputation included as far as there is any."""
    seconds = predictor.layers(setup.sizes[0])
    m = len(setup.sizes)
    again = 1 + checkpointed(setup.checkpoint, m) / m
    layers = zip(seconds.forward, seconds.backward, seconds.accumulate, strict=True)
    return [f * again + b + a for f, b, a in layers]


class _Estimate:
    """Estimate a partition's peak bytes from prefix sums, layer by layer as it grows."""

    def __init__(self, predictor: Predictor, setup: Setup) -> None:
        layers = predictor.layers(setup.sizes[0]).layers
        footprints = predictor.counts.footprints(setup.sizes[0])
        self.m = len(setup.sizes)
        self.recomputed = checkpointed(setup.checkpoint, self.m)
        self.mini_batch = predictor.counts.input * setup.batch_size
        self.parameters = [layer.parameters for layer in layers]
        self.static = [layer.parameters * (2 + setup.state) + layer.frozen for layer in layers]
        self.output = [layer.output for layer in layers]
        self.inputs = [0.0, *self.output[:-1]]
        known: set[int] = set()
        self.saved, self.inner = [], []
        for footprint in footprints:
            sizes = dict(footprint.sizes)
            self.saved.append(sum(sizes[x] for x in footprint.saves if x not in known))
            live = most = 0.0
            for change in footprint.later:
                if change.storage not in known:
                    live += change.bytes
                    most = max(most, live)
            known |= set(footprint.saves)
            forward = footprint.graph - self.saved[-1]
            self.inner.append(max(most + footprint.output_grad, forward))

    def peak(self, balance: Sequence[int]) -> float:
        """Estimate the fullest partition of a balance."""
        starts = [sum(balance[:j]) for j in range(len(balance))]
        return max(next(islice(self.grow(a), k - 1, None)) for a, k in zip(starts, balance, strict=True))

    def grow(self, start: int) -> Iterator[float]:
        """Yield the bytes of the partition from layer `start`, one layer longer every time."""
        inputs = self.inputs[start]
        static = self.mini_batch if start == 0 else 0.0
        kept = inner = 0.0
        for layer in range(start, len(self.static)):
            static += self.static[layer]
            kept += self.saved[layer]
            inner = max(inner, kept + self.inner[layer])
            beside = self.m - 1 - self.recomputed
            stashed = self.recomputed * inputs + max(0, beside) * (kept + inputs)
            edge = 2 * self.m * self.output[layer] if layer == len(self.static) - 1 else self.output[layer]
            yield static + stashed + inputs + inner + edge


def _smallest(predictor: Predictor, setup: Setup, estimate: _Estimate) -> tuple[int, ...] | None:
    """Return the balance whose fullest partition is estimated to need the least."""
    weights, n = [0.0] * len(predictor.counts), len(setup.balance)
    low, high = 0.0, 2 * estimate.peak((len(weights),))
    best = None
    for _ in range(20):
        room = (low + high) / 2
        balance = _greedy(weights, estimate, n, 0.0, room)
        if balance is None:
            low = room
        else:
            best, high = balance, room
    return best


def _relieve(predictor: Predictor, setup: Setup, memory: float) -> tuple[int, ...]:
    """Move layers out of the fullest partition, by ever smaller steps, until all fit or nothing helps."""

    def peaks(balance: Sequence[int]) -> list[float]:
        found = setup_memory(predictor.counts, replace(setup, balance=tuple(balance)))
        return [device.peak for device in found]

    balance = list(setup.balance)
    now = peaks(balance)
    stride = max(1, sum(balance) // (8 * len(balance)))
    while stride and max(now) > memory:
        fullest = now.index(max(now))
        for neighbour in (fullest - 1, fullest + 1):
            if 0 <= neighbour < len(balance) and balance[fullest] > stride:
                moved = list(balance)
                moved[fullest] -= stride
                moved[neighbour] += stride
                then = peaks(moved)
                if max(then) < max(now):
                    balance, now = moved, then
                    break
        else:
            stride //= 2
    return tuple(balance)


def _fill(predictor: Predictor, setup: Setup, estimate: _Estimate, memory: float) -> tuple[int, ...] | None:
    """Return the balance whose heaviest partition is lightest, of those that the estimate allows; `None`: none."""
    weights, n = _weights(predictor, setup), len(setup.balance)
    low, high = max(max(weights), sum(weights) / n), sum(weights)
    best = _greedy(weights, estimate, n, high, memory)
    if best is None:
        return None
    for _ in range(20):
        bound = (low + high) / 2
        balance = _greedy(weights, estimate, n, bound, memory)
        if balance is None:
            low = bound
        else:
            best, high = balance, bound
        if high - low <= 1e-3 * high:
            break
    return best


def _greedy(
    weights: Sequence[float], estimate: _Estimate, n: int, bound: float, memory: float
) -> tuple[int, ...] | None:
    """Fill partitions up to both bounds; return the balance if `n` are enough for all layers."""
    balance: list[int] = []
    start = 0
    for j in range(n):
        left = n - 1 - j  # partitions that need a layer each
        seconds, stop = 0.0, start
        for nbytes, weight in zip(estimate.grow(start), weights[start:], strict=True):
            seconds += weight
            if seconds > bound * (1 + 1e-12) or nbytes > memory or stop >= len(weights) - left:
                break
            stop += 1
        if stop == start:
            return None
        balance.append(stop - start)
        start = stop
    return tuple(balance) if start == len(weights) else None


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


def _hopeless(predictor: Predictor, devices: int, memory: float, state: int) -> str | None:
    """Say what makes every setup impossible: a layer that fits no device, or all of them together; else `None`."""
    from torchgpipe.plan.report import amount

    layers = predictor.layers(1).layers
    footprints = predictor.counts.footprints(1)
    needs = []
    for i, layer in enumerate(layers):
        task = task_bytes(footprints, i, i + 1)
        work = max(task.inputs + task.graph, task.recomputed + task.later) + task.output_grad
        needs.append(layer.parameters * (2 + state) + layer.frozen + work)
    heaviest = max(range(len(needs)), key=needs.__getitem__)
    if needs[heaviest] > memory:
        return (
            f"layer {heaviest} ({layers[heaviest].name}) alone needs {amount(needs[heaviest])} of {amount(memory)}, "
            "with micro-batches of one sample: split the layer, or use devices with more memory"
        )
    static = sum(layer.parameters * (2 + state) + layer.frozen for layer in layers)
    if static > devices * memory:
        return (
            f"parameters, gradients and optimizer state need {amount(static)}, and {devices} device(s) have "
            f"{amount(devices * memory)}: use more devices, or an optimizer with less state"
        )
    return None


def _why(predictor: Predictor, batch_size: int, devices: int, memory: float, state: int) -> str:
    """Say by how much the setup that needs the least misses, where no setup was found."""
    from torchgpipe.plan.report import amount

    least = Setup(batch_size, (1,), batch_size, "always", state)
    layers = predictor.layers(1).layers
    needed = [layer.parameters * (2.0 + state) + layer.frozen for layer in layers]
    balance = tuple(minimise_heaviest(needed, min(devices, len(layers))))
    peak = max(d.peak for d in setup_memory(predictor.counts, replace(least, balance=balance)))
    return (
        f"no balance fits {devices} device(s) of {amount(memory)}: even in {batch_size} micro-batches of one, all "
        f"recomputed and balanced by parameters, the fullest needs {amount(peak)}; use more devices, or a smaller batch"
    )
