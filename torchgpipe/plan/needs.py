"""Bound the bytes that a partition needs from below, for every pair of cuts at once.

`memory` has the bytes of one balance exactly. Here whatever depends on other partitions is left out, and a tensor that
several layers save is that of the first of them, also where a cut comes between. So what remains are sums over the
layers up to each cut, and maxima between two cuts; and a partition that needs too much here needs too much in every
balance. Looked at are the first backward, when the most is stashed; the second and the last, when there are gradients
of parameters besides; and the optimizer's step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from torchgpipe.checkpoint import checkpointed
from torchgpipe.plan.count import Counts
from torchgpipe.plan.footprint import Change
from torchgpipe.plan.predict import Setup

__all__ = ["Needs"]

SAFE = 1 - 1e-6
"""What bounds are multiplied by, for rounding."""


class Needs:
    """Bound the bytes of partitions at work on micro-batches of `size`, from any of the cuts to any other."""

    def __init__(self, counts: Counts, size: int, cuts: Sequence[int]) -> None:
        layers, self.footprints = counts.low, counts.footprints(size)
        self.mini_batch, self.copied = counts.input, counts.copied
        self.cuts = list(cuts)
        self.parameters = self._between([layer.parameters for layer in layers])
        self.frozen = self._between([layer.frozen for layer in layers])
        outside = set(self.footprints[0].inputs)  # parts of the mini-batch, which take nothing of their own
        known = set(outside)
        saved, inputs, first, later = [], [], _Working(), _Working()
        for layer in self.footprints:
            sizes = dict(layer.sizes)
            inputs.append(sum(sizes[x] for x in {*layer.inputs} - outside))
            saved.append(sum(sizes[x] for x in layer.saves if x not in known))
            first.add(layer.first, layer.first_held, known)
            later.add(layer.later, layer.later_held, known)
            known |= set(layer.saves)
        self.saved = self._between(saved)
        self.first, self.later = (self._working(x) for x in (first, later))
        self.inputs = self._at([*inputs, 0.0])
        self.input_grad = self._at([0.0, *(x.input_grad for x in self.footprints[1:]), 0.0])
        self.given_grad = self._at([0.0, *(x.output_grad for x in self.footprints[:-1]), 0.0])
        ends = self.footprints[-1]
        self.output = sum(size for x, size in ends.sizes if x in set(ends.outputs) - outside)
        self.output_grad = ends.output_grad
        self.leaving, self.arriving = self._skips()

    def at_least(self, setup: Setup) -> Tensor:
        """Return the bytes of every partition from one of the cuts (rows) to another (columns)."""
        m, optimizer = len(setup.sizes), setup.optimizer
        recomputed = checkpointed(setup.checkpoint, m)
        inputs = self.inputs[:, None] + self.arriving
        most = self.parameters * (1 + (optimizer.made if optimizer.together else 0.0))
        for i in {m - 1, max(0, m - 2), 0}:
            nbytes = min(i, recomputed) * inputs + (max(0, i - recomputed) + 1) * self.saved
            nbytes += (self.leaving * (1 + min(i, 1)) + self.given_grad[None, :]) * self.copied
            if i == m - 1:
                nbytes += self.first
            else:
                nbytes += self.later + self.parameters + self.input_grad[:, None]
            nbytes[:, -1] += m * self.output_grad
            most = torch.maximum(most, nbytes)
        most += (1 + optimizer.state) * self.parameters + self.frozen
        most[:, -1] += m * self.output
        most[0] += self.mini_batch * setup.batch_size
        return most * SAFE - (1 - SAFE) * most[0, -1]

    def _at(self, values: Sequence[float]) -> Tensor:
        """Return what there is at each layer, for the cuts; the last value is for the end."""
        return torch.tensor([values[cut] for cut in self.cuts], dtype=torch.float32)

    def _between(self, values: Sequence[float]) -> Tensor:
        sums = torch.tensor([0.0, *accumulate(map(float, values))], dtype=torch.float64)[self.cuts]
        return (sums[None, :] - sums[:, None]).float()

    def _working(self, layers: _Working) -> Tensor:
        """Return the most bytes that backward takes between two cuts beyond what lives when it begins."""
        sums = [0.0, *accumulate(layers.left)]
        over = [most - left for most, left in zip(layers.most, sums[1:], strict=True)]
        none = float("-inf")
        blocks = [(max(over[a:b]), max(over[a : b - 1], default=none)) for a, b in pairwise(self.cuts)]
        within, before_last = (torch.tensor(x) for x in zip(*blocks, strict=True))
        count = len(self.cuts)
        earlier = torch.ones(count - 1, count - 1, dtype=torch.bool).tril_(-1)
        running = within.expand(count - 1, -1).masked_fill(earlier, none).cummax(1).values
        found = torch.full((count, count), none)
        found[:-1, 1:] = before_last
        found[:-1, 2:] = torch.maximum(found[:-1, 2:], running[:, :-1])
        # Whoever asks for a backward holds the gradients that it starts from.
        ends = [
            (sums[b] + layers.held_left[b - 1] - layers.left[b - 1], layers.held_most[b - 1]) for b in self.cuts[1:]
        ]
        total, alone = (torch.tensor([0.0, *x]) for x in zip(*ends, strict=True))
        return torch.maximum(found.add_(total), alone.clamp(min=0)[None, :])

    def _skips(self) -> tuple[Tensor, Tensor]:
        """Return the gradients of skips that leave a partition, and the skips that come to it, in bytes."""
        popped = {number: p for p, layer in enumerate(self.footprints) for number in layer.pops}
        leaving, arriving = torch.zeros(2, len(self.cuts), len(self.cuts))
        seen: set[int] = set()
        for q, layer in enumerate(self.footprints):
            sizes = dict(layer.sizes)
            for (_, number), grad in zip(layer.stashes, layer.stash_grads, strict=True):
                if number in seen:
                    continue
                seen.add(number)
                p = popped[number]
                # Partitions begin at rows and end at columns.
                after, behind = bisect_right(self.cuts, q), bisect_right(self.cuts, p)
                leaving[:after, after:behind] += grad
                for row in range(after, behind):
                    if number not in self.footprints[self.cuts[row]].inputs:  # it comes as the input, too
                        arriving[row, behind:] += sizes[number]
        return leaving, arriving


class _Working:
    """What each layer's backward takes at most, and leaves: bytes beyond those before it."""

    def __init__(self) -> None:
        self.most: list[float] = []
        self.left: list[float] = []
        self.held_most: list[float] = []
        """The same where somebody holds the gradients that it starts from."""
        self.held_left: list[float] = []

    def add(self, changes: Sequence[Change], held: Sequence[Change], known: set[int]) -> None:
        """Add a layer; storages that are `known` are held by others."""
        held = held if changes else ()  # a layer that does nothing hands on the gradients that somebody holds
        for trace, mosts, lefts in ((changes, self.most, self.left), (held, self.held_most, self.held_left)):
            live = most = 0.0
            for change in trace:
                if change.storage is None or change.storage not in known:
                    live += change.bytes
                    most = max(most, live)
            mosts.append(most)
            lefts.append(live)
