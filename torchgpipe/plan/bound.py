"""Bound a step's seconds from below, for every balance at once.

The replay makes a step as long as the longest chain of tasks of which each waits for the one before. So every chain is
a bound. For m micro-batches on n partitions, and any partition j, take these two, one after the other:

- forward: the first micro-batch on partitions 0 … j, the others on j, and the last one on to partition n - 1;
- backward: the last micro-batch on partitions n - 1 … j, the others on j, and the first one on to partition 0.

Both pass every boundary once, so that all copies are in both. Let f, b and w be a layer's seconds of forward, of
backward, and of backward with recomputation and adding up gradients; for the last micro-batch f' and b', which may be
smaller and has nothing to add to. If partition j has the layers a … z, the chains together take

    f(before a) + (m - 1) f(a … z) + f'(a …) + b'(a …) + (m - 1) w(a … z) + b(before a) + 2 x the copies.

The optimizer's step follows on all devices, so that partition j's own can be added: that is V(a, z). Hence

    step >= max over the partitions of V + 2 x the sum of the copies at the cuts,

for any balance. Forward and backward may be longest on different partitions, so the largest of forward's part of V and
the largest of the rest may be added up as well. Where the last micro-batch is smaller, the chain that follows the one
before it to the end may be longer; it is taken, too. With checkpoint='always' the last partition recomputes before its
first backward. A chain may also go on to the second micro-batch on the last partition already, which is longer where
adding up gradients takes long (`early`). Skips' own copies are left out, and so is whatever the replay may add later:
leaving out makes a bound lower, never wrong.

V is the difference of a sum over layers at two cuts, plus something at the first, grows with every layer that is added
on either side, and so the balance whose largest V is smallest is found by bisection, without memory (`lightest`) or
with it (`cuts`). Other balances near the bound are looked at one by one (`branch`). How far the bound is from a plan is
the plan's `gap`.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, product

import torch
from torch import Tensor

from torchgpipe.checkpoint import checkpointed
from torchgpipe.plan.predict import Predictor, Setup

__all__ = ["Bound", "without_rest"]

HALVINGS = 40
SAFE = 1 - 1e-6
"""What bounds are multiplied by, for rounding."""


_Form = tuple[list[float], list[float]]
"""Sums over the layers up to each cut, and what comes on top at a partition's first cut; the largest counts."""


def without_rest(setup: Setup) -> Setup:
    """Return the setup without its last micro-batch, if that is smaller: a step of it takes no longer."""
    size, *_ = setup.sizes
    whole = setup.batch_size // size
    return replace(setup, batch_size=size * whole, chunks=whole)


class Bound:
    """Bound the seconds of a setup with any balance; the setup's own balance does not matter."""

    def __init__(self, predictor: Predictor, setup: Setup, *, early: bool = False) -> None:
        sizes = setup.sizes
        m = len(sizes)
        recomputed = checkpointed(setup.checkpoint, m)
        full, last = predictor.layers(sizes[0]), predictor.layers(sizes[-1])
        ends_f = _sums(last.forward if recomputed == m else last.graph)
        ends_b = _sums(last.backward)
        again = _sums(full.graph) if recomputed else [0.0] * len(ends_f)
        f, b = ends_f, ends_b
        if m > 1:
            f = _sums(full.forward if recomputed else full.graph)
            b = _sums([x + y for x, y in zip(full.backward, full.accumulate, strict=True)])
        w = [x + y for x, y in zip(b, again, strict=True)]
        forward: list[_Form] = [
            ([(m - 1) * x for x in f], [x + ends_f[-1] - y for x, y in zip(f, ends_f, strict=True)])
        ]
        backward: list[_Form] = [
            ([(m - 1) * x for x in w], [x + ends_b[-1] - y for x, y in zip(b, ends_b, strict=True)])
        ]
        if early:
            backward = [([(m - 2) * x for x in w], [b[-1]] * len(b))]
        if sizes[-1] < sizes[0]:
            forward.append(([(m - 2) * x for x in f], [f[-1]] * len(f)))
        layers = full.layers
        weights = _sums([float(layer.parameters) for layer in layers])
        everywhere, slope = predictor.update_bound(setup, weights[-1])
        self._forward = forward
        self._backward = [
            (
                [x + slope * p for x, p in zip(sums, weights, strict=True)],
                [x + everywhere for x in before],
            )
            for sums, before in backward
        ]
        self._forms = [
            ([x + y for x, y in zip(a, b, strict=True)], [x + y for x, y in zip(before_a, before_b, strict=True)])
            for (a, before_a), (b, before_b) in product(self._forward, self._backward)
        ]
        transfer = predictor.hardware.transfer
        self.copies = [0.0, *(2 * transfer(layer.output) for layer in layers[:-1]), 0.0]
        """Seconds of both copies at each cut; there are none at the ends."""
        self.cheapest = [0.0, *accumulate(sorted(self.copies[1:-1]))]
        """The least seconds of so many cuts' copies."""
        once = _sums(last.graph) if recomputed == m else [0.0] * len(ends_f)
        if early:
            once = [x + y + z for x, y, z in zip(once, ends_b, again, strict=True)]
        self.last = [once[-1] - x for x in once]
        """Seconds that only the last partition takes, by where it begins."""

    def lightest(self, partitions: int) -> float:
        """Return the bound for so many partitions, whatever they need of memory."""
        low, high = max(before[0] for _, before in self._forms), self._seconds(0, len(self.copies) - 1)
        if partitions > 1:
            for _ in range(HALVINGS):
                middle = (low + high) / 2
                low, high = (low, middle) if self._enough(partitions, middle) else (middle, high)
                if high - low <= 1e-7 * high:
                    break
        else:
            low = high
        return (low + self.cheapest[partitions - 1] + self.last[-2]) * SAFE

    def of(self, balance: Sequence[int]) -> float:
        """Return the bound for one balance."""
        cuts = list(accumulate(balance, initial=0))
        parts = (max(sums[z] - sums[a] + before[a] for sums, before in self._forms) for a, z in pairwise(cuts))
        return max(parts) + sum(self.copies[cut] for cut in cuts) + self.last[cuts[-2]]

    def parts(self, cuts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return forward's part of V, and the rest, for every partition from one cut (rows) to another (columns)."""
        at = torch.tensor(cuts)

        def longest(forms: Sequence[_Form]) -> Tensor:
            tables = []
            for sums, before in forms:
                total, first = (torch.tensor(x, dtype=torch.float64)[at] for x in (sums, before))
                tables.append(total.float()[None, :] + (first - total).float()[:, None])
            return functools.reduce(torch.maximum, tables)

        return longest(self._forward), longest(self._backward)

    def _seconds(self, a: int, z: int) -> float:
        return max(sums[z] - sums[a] + before[a] for sums, before in self._forms)

    def _enough(self, partitions: int, bound: float) -> bool:
        """Return whether so many partitions take all layers, none longer than the bound."""
        start, end = 0, len(self.copies) - 1
        for _ in range(partitions):
            stop = min(bisect_right(sums, bound + sums[start] - before[start]) for sums, before in self._forms) - 1
            if stop >= end:
                return True
            if stop <= start:
                return False
            start = stop
        return False


def _sums(seconds: Sequence[float]) -> list[float]:
    return list(accumulate(seconds, initial=0.0))
