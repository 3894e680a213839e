"""What the layers of a setup take: a bound on its steps, whatever the balance, and the balances to begin with."""

import functools
from collections.abc import Sequence
from itertools import accumulate, pairwise

from torchgpipe.balance.minimise import minimise_heaviest
from torchgpipe.engine.arrangement import arranged
from torchgpipe.plan.predict import Predictor, Setup
from torchgpipe.plan.replay import recomputing
from torchgpipe.tensors.checkpoint import checkpointed

SAFE = 1 - 1e-9
"""What bounds are multiplied by, for rounding."""


class Work:
    """What layers take with the micro-batches, checkpoint mode and schedule of `setup`, and balances that share it out.

    In GPipe's schedule a partition waits while one micro-batch is in other partitions: the first, on its way forward to
    it and backward from it, and the last, in the partitions behind it. So a step takes at least what one micro-batch
    takes in all layers, and what any partition's layers take beyond that, their `seconds`. In others the most of both
    is known: of a micro-batch's way without what may be done later, and of what a partition's layers take in all.
    """

    def __init__(self, predictor: Predictor, setup: Setup) -> None:
        self.predictor, self.setup = predictor, setup
        m, recomputed = len(setup.sizes), checkpointed(setup.checkpoint, len(setup.sizes))
        full, last = (
            predictor.layers(setup.sizes[0]),
            predictor.layers(setup.sizes[-1]),
        )  # the last may be smaller
        again = min(recomputed, m - 1)
        # Of each layer: the first micro-batch's forward and backward, the last one's both, and all but the last one's.
        forward = full.forward if again else full.graph
        backward = [a + b for a, b in zip(full.backward, full.accumulate, strict=True)]
        last_forward = last.forward if recomputed == m else last.graph
        last_both = [a + b for a, b in zip(last_forward, last.backward, strict=True)]
        others = [
            again * a + (m - 1) * (b + c)
            for a, b, c in zip(full.forward, full.graph, backward, strict=True)
        ]
        one = [
            min(a + b, c) if m > 1 else c
            for a, b, c in zip(forward, backward, last_both, strict=True)
        ]
        self.seconds = [a + (b - c) for a, b, c in zip(others, last_both, one, strict=True)]
        if not setup.gathered:
            self.seconds = [a + b for a, b in zip(others, last_both, strict=True)]
        self._one = sum(one) - (sum(full.weights) if setup.halves else 0.0)
        self._copies = [2 * predictor.hardware.transfer(layer.output) for layer in full.layers[:-1]]
        self._cheapest = list(accumulate(sorted(self._copies), initial=0.0))
        self._parameters = sum(layer.parameters for layer in full.layers)

    def bound(self, n: int, most: float = 0.0, copies: float = 0.0) -> float:
        """Return what no balance on `n` devices can beat whose heaviest one, and copies, take at least that."""
        most = max(most, sum(self.seconds) / n, max(self.seconds))
        update = self.predictor.update(self.setup, [self._parameters / n] * n)
        way = self._one + max(copies, self._cheapest[n - 1])
        return (way + most + update if self.setup.gathered else max(way, most) + update) * SAFE

    def bound_of(self, balance: Sequence[int]) -> float:
        """Return what this balance cannot beat."""
        _, n, _, at = arranged(self.setup.schedule, len(balance))
        cuts = zip(accumulate(balance), pairwise(at), strict=False)
        copies = sum(self._copies[cut - 1] for cut, (a, b) in cuts if a != b)
        return self.bound(n, heaviest(self.seconds, balance), copies)

    def stages(self, n: int) -> int:
        """Return how many stages `n` devices have; none if the schedule is not for so many devices or micro-batches."""
        schedule = self.setup.schedule
        if isinstance(schedule, str):
            return n * len(recomputing(schedule, 1, 1).placement)
        fits = n == len(schedule.lists) and len(self.setup.sizes) <= schedule.micro_batches
        return len(schedule.placement) if fits else 0

    def balance(self, n: int, share: float) -> tuple[int, ...]:
        """Return the balance on `n` devices that evens out seconds, and bytes instead to this share of both."""
        a, b = (1 - share) / (sum(self.seconds) or 1.0), share / sum(self.held)
        costs = [a * x + b * y for x, y in zip(self.seconds, self.held, strict=True)]
        return tuple(minimise_heaviest(costs, self.stages(n)))

    @functools.cached_property
    def held(self) -> list[float]:
        """The bytes that each layer adds to its partition's in the second backward, at the least."""
        setup, counts = self.setup, self.predictor.counts
        m, footprints = len(setup.sizes), counts.footprints(setup.sizes[0])
        each = (
            1 + setup.optimizer.state + (m > 1)
        )  # of a single micro-batch, gradients come as activations go
        kept = max(1, m - 1 - checkpointed(setup.checkpoint, m)) if setup.gathered else 1
        known, held = {*footprints[0].inputs}, []  # parts of the mini-batch, which is there anyway
        for layer, footprint in zip(counts.low, footprints, strict=True):
            new = {*footprint.saves} - known
            saved = sum(nbytes for number, nbytes in footprint.sizes if number in new)
            held.append(layer.parameters * each + layer.frozen + kept * saved)
            known |= new
        held[0] += counts.input * setup.batch_size
        held[-1] += (m if setup.gathered else 1) * footprints[-1].output_grad
        return held


def heaviest(costs: Sequence[float], balance: Sequence[int]) -> float:
    """Return what the heaviest partition takes."""
    sums = list(accumulate(costs, initial=0.0))
    return max(sums[b] - sums[a] for a, b in pairwise(accumulate(balance, initial=0)))
