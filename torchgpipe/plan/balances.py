"""What the layers of a setup take: a bound on its steps, whatever the balance, and the balances to begin with."""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf

from torchgpipe.balance.minimise import minimise_heaviest
from torchgpipe.checkpoint import checkpointed
from torchgpipe.plan.predict import Predictor, Setup

__all__ = ["Work"]

HALVINGS = 40
SAFE = 1 - 1e-9
"""What bounds are multiplied by, for rounding."""
BYTES = (0.25, 0.5, 0.75, 1.0)
"""The shares of bytes, beside seconds, in what a balance evens out where memory is scarce."""


class Work:
    """What layers take with the micro-batches and the checkpoint mode of `setup`, and balances that share it out."""

    def __init__(self, predictor: Predictor, setup: Setup) -> None:
        self.predictor, self.setup = predictor, setup
        m, recomputed = len(setup.sizes), checkpointed(setup.checkpoint, len(setup.sizes))
        full, last = predictor.layers(setup.sizes[0]), predictor.layers(setup.sizes[-1])
        again = min(recomputed, m - 1)
        forward, end = full.forward if again else full.graph, last.forward if recomputed == m else last.graph
        self.plain = [a + b for a, b in zip(full.graph, full.backward, strict=True)]
        """Seconds of forward and backward."""
        self.others = [
            again * a + (m - 1) * (b + c + d)
            for a, b, c, d in zip(full.forward, full.graph, full.backward, full.accumulate, strict=True)
        ]
        """Seconds of all micro-batches but the last."""
        lasts = [a + b for a, b in zip(end, last.backward, strict=True)]
        firsts = (
            [a + b + c for a, b, c in zip(forward, full.backward, full.accumulate, strict=True)] if m > 1 else lasts
        )
        more = accumulate((a - b for a, b in zip(firsts, lasts, strict=True)), initial=0.0)
        self._last = sum(lasts)
        self._sums = list(accumulate(self.others, initial=0.0))
        self._before = [a - b for a, b in zip(more, self._sums, strict=True)]
        self._copies = [2 * predictor.hardware.transfer(layer.output) for layer in full.layers[:-1]]
        self._parameters = sum(layer.parameters for layer in full.layers)

    def bound(self, n: int) -> float:
        """Return the seconds that no balance over `n` partitions can beat.

        In GPipe's schedule the first micro-batch goes forward and backward through the layers before a partition while
        that waits, and the last one through those behind it. So a step takes at least that, and the whole work of any
        partition. How small the largest such sum can be is found by bisection.
        """
        low, high = 0.0, 2 * self._sums[-1] + self._last
        for _ in range(HALVINGS):
            middle, start = (low + high) / 2, 0
            for _ in range(n):
                start = max(start, bisect_right(self._sums, middle - self._before[start]) - 1)
            low, high = (low, middle) if start == len(self.others) else (middle, high)
        return self._step(n, low, sorted(self._copies)[: n - 1])

    def bound_of(self, balance: Sequence[int]) -> float:
        """Return the same of one balance."""
        cuts = list(accumulate(balance, initial=0))
        most = max(self._before[a] + self._sums[b] for a, b in pairwise(cuts))
        return self._step(len(balance), most, [self._copies[cut - 1] for cut in cuts[1:-1]])

    def _step(self, n: int, most: float, copies: Sequence[float]) -> float:
        update = self.predictor.update(self.setup, [self._parameters / n] * n)
        return (self._last + most + sum(copies) + update) * SAFE

    def even(self, n: int) -> list[tuple[int, ...]]:
        """Return balances that share out seconds."""
        return [tuple(minimise_heaviest(costs, n)) for costs in (self.others, self.plain)]

    @functools.cached_property
    def held(self) -> list[float]:
        """The bytes that each layer adds to its partition's in the second backward, at the least."""
        setup, counts = self.setup, self.predictor.counts
        m, footprints = len(setup.sizes), counts.footprints(setup.sizes[0])
        each = 1 + setup.optimizer.state + (m > 1)  # of a single micro-batch, gradients come as activations go
        kept = max(1, m - 1 - checkpointed(setup.checkpoint, m))
        given = {*footprints[0].inputs}  # parts of the mini-batch, which is there anyway
        known, held = set(given), []
        for layer, footprint in zip(counts.low, footprints, strict=True):
            saved = sum(nbytes for number, nbytes in footprint.sizes if number in {*footprint.saves} - known)
            known |= {*footprint.saves}
            held.append(layer.parameters * each + layer.frozen + kept * saved)
        outputs = {*footprints[-1].outputs} - given
        output = sum(nbytes for number, nbytes in footprints[-1].sizes if number in outputs)
        held[0] += counts.input * setup.batch_size
        held[-1] += m * (output + footprints[-1].output_grad)
        return held

    def least(self, memory: float) -> float:
        """Return how many partitions it takes at the least; infinity where a layer has no room."""
        if max(self.held) > memory:
            return inf
        partitions, left = 1, memory
        for nbytes in self.held:
            if nbytes > left:
                partitions, left = partitions + 1, memory
            left -= nbytes
        return partitions

    def mixed(self, n: int) -> list[tuple[int, ...]]:
        """Return balances that share out bytes, and both bytes and seconds."""
        shares = [(a / sum(self.plain), b / sum(self.held)) for a, b in zip(self.plain, self.held, strict=True)]
        return [tuple(minimise_heaviest([a * (1 - x) + b * x for a, b in shares], n)) for x in BYTES]
