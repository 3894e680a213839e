"""Fill partitions greedily, up to a bound in seconds and one in bytes, and bisect the bounds.

What a partition holds is estimated in closed form here, layer by layer as it grows; `memory` has it exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from torchgpipe.checkpoint import checkpointed
from torchgpipe.plan.memory import setup_memory
from torchgpipe.plan.predict import Predictor, Setup

__all__ = ["Estimate", "fill", "layer_seconds", "relieve", "smallest"]


def layer_seconds(predictor: Predictor, setup: Setup) -> tuple[float, ...]:
    """Return the seconds that each layer takes for a micro-batch, recomputation included as far as there is any."""
    seconds = predictor.layers(setup.sizes[0])
    m = len(setup.sizes)
    recomputed = checkpointed(setup.checkpoint, m) / m
    layers = zip(seconds.forward, seconds.graph, seconds.backward, seconds.accumulate, strict=True)
    return tuple(f * recomputed + g + b + a for f, g, b, a in layers)


class Estimate:
    """Estimate a partition's peak bytes from prefix sums, layer by layer as it grows."""

    def __init__(self, predictor: Predictor, setup: Setup) -> None:
        layers = predictor.layers(setup.sizes[0]).layers
        footprints = predictor.counts.footprints(setup.sizes[0])
        self.m = len(setup.sizes)
        self.recomputed = checkpointed(setup.checkpoint, self.m)
        self.mini_batch = predictor.counts.input * setup.batch_size
        self.parameters = [layer.parameters for layer in layers]
        self.optimizer = setup.optimizer
        self.static = [layer.parameters * (2 + setup.optimizer.state) + layer.frozen for layer in layers]
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
        kept = inner = update = 0.0
        for layer in range(start, len(self.static)):
            static += self.static[layer]
            kept += self.saved[layer]
            inner = max(inner, kept + self.inner[layer])
            beside = self.m - 1 - self.recomputed
            stashed = self.recomputed * inputs + max(0, beside) * (kept + inputs)
            edge = 2 * self.m * self.output[layer] if layer == len(self.static) - 1 else self.output[layer]
            made = (self.optimizer.made + self.optimizer.left) * self.parameters[layer]
            update = update + made if self.optimizer.together else max(update, made)
            yield static + max(stashed + inputs + inner + edge, update)


def fill(predictor: Predictor, setup: Setup, estimate: Estimate, memory: float) -> tuple[int, ...] | None:
    """Return the balance whose heaviest partition is lightest, of those that the estimate allows; `None`: none."""
    weights, n = layer_seconds(predictor, setup), len(setup.balance)
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


def smallest(predictor: Predictor, setup: Setup, estimate: Estimate) -> tuple[int, ...] | None:
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


def relieve(predictor: Predictor, setup: Setup, memory: float) -> tuple[int, ...]:
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


def _greedy(
    weights: Sequence[float], estimate: Estimate, n: int, bound: float, memory: float
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
