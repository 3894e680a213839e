"""Prepare the search for the fastest balance.

This module computes balances with which the search can begin, and a time that no balance can beat.
"""

import functools
from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import add

from torchgpipe.balance.minimise import minimise_heaviest
from torchgpipe.engine.arrangement import arranged
from torchgpipe.plan.count.footprint import LayerCount
from torchgpipe.plan.count.optimizer import Optimizer
from torchgpipe.plan.predict.predict import Predictor
from torchgpipe.plan.predict.replay import recomputing
from torchgpipe.plan.predict.setup import Setup
from torchgpipe.tensors.checkpoint import checkpointed

SAFE = 1 - 1e-9
"""The factor by which bounds are lowered, in case they were rounded up."""


class Work:
    """The seconds and bytes of a setup's layers, with lower bounds on the step time.

    `seconds` says for each layer how long it keeps a device busy in a step, and `held` how many
    bytes it needs. The balance of the setup is ignored.

    A lower bound on the step time of all balances follows from two numbers:

    - the passage: the seconds of one micro-batch's forward and backward through all layers. If
      backwards are split, the halves that compute weights' gradients are left out, because they can
      run later.
    - the work: how many seconds the busiest partition computes.

    In GPipe's schedule, the bound is the passage of one micro-batch, plus the busiest partition's
    work for all other micro-batches. The reason is that a partition waits while one micro-batch is
    in other partitions: the first micro-batch in earlier partitions (at the start and at the end of
    the step), and the last micro-batch in later partitions (in the middle of the step).

    In other schedules, the bound is the larger of the two numbers.

    Args:
        predictor: The predictor of the model.
        setup: The setup.
    """

    def __init__(self, predictor: Predictor, setup: Setup) -> None:
        self.predictor = predictor
        self.setup = setup
        sizes = setup.sizes
        m = len(sizes)
        recomputed = checkpointed(setup.checkpoint, m)
        full = predictor.layers(sizes[0])
        last = predictor.layers(sizes[-1])  # The last micro-batch may be smaller.
        gathered = setup.gathered
        again = min(recomputed, m - 1)  # recomputations, apart from the last micro-batch's
        first_forward = full.forward if again else full.graph
        last_forward = last.forward if recomputed == m else last.graph
        backwards = list(map(add, full.backward, full.accumulate))
        first_ways = list(map(add, first_forward, backwards))
        last_ways: list[float] = list(map(add, last_forward, last.backward))
        ways: list[float] = last_ways
        if m > 1:
            ways = list(map(min, first_ways, last_ways))
        self.seconds: list[float] = []
        """For each layer, the seconds in which it keeps its partition's device busy."""
        columns = (full.forward, full.graph, backwards, last_ways, ways)
        for forward, graph, backward, last_way, way in zip(*columns, strict=True):
            others = again * forward + (m - 1) * (graph + backward)
            beyond = last_way - way if gathered else last_way
            self.seconds.append(others + beyond)
        self._way: float = sum(ways)
        """The seconds of one micro-batch's forward and backward through all layers."""
        losses = [sum(predictor.loss(size)) for size in sizes]
        self._loss = sum(losses) if gathered else 0.0
        """The seconds of a loss for the whole mini-batch, between all forwards and backwards."""
        if not gathered:
            self.seconds[-1] += sum(losses)
            self._way += min(losses)
        if setup.halves:
            self._way -= sum(full.weights)
        transfer = predictor.hardware.transfer
        copies = [2 * transfer(layer.output) for layer in full.layers[:-1]]
        self._copies = copies
        """The seconds to copy a micro-batch after each layer, forward and backward together."""
        self._cheapest = list(accumulate(sorted(copies), initial=0.0))
        """The least seconds that k boundaries' copies take, for each number k."""
        self._parameters = sum([layer.parameters for layer in predictor.counts.once])

    def bound(self, n: int, most: float = 0.0, copies: float = 0.0) -> float:
        """Return a lower bound on the seconds of a step on `n` devices, for all balances.

        Args:
            n: How many devices there are.
            most: A lower bound on the seconds that the busiest partition works, if one is known.
            copies: A lower bound on the seconds that one micro-batch's copies take, if one is
                known.
        """
        seconds, setup = self.seconds, self.setup
        most = max(most, sum(seconds) / n, max(seconds))
        parameters = [self._parameters / n] * n
        update = self.predictor.update(setup, parameters)
        way = self._way + max(copies, self._cheapest[n - 1])
        step = way + most + self._loss if setup.gathered else max(way, most)
        return (step + update) * SAFE

    def bound_of(self, balance: Sequence[int]) -> float:
        """Return a lower bound on the seconds of a step with the given balance."""
        _, n, _, placement = arranged(self.setup.schedule, len(balance))
        cuts = zip(accumulate(balance), pairwise(placement), strict=False)
        copies = [self._copies[cut - 1] for cut, (here, there) in cuts if here != there]
        return self.bound(n, heaviest(self.seconds, balance), sum(copies))

    def stages(self, n: int) -> int:
        """Return how many stages the setup's schedule has on `n` devices together.

        The number is 0 if the schedule cannot run on `n` devices, or cannot run with the setup's
        number of micro-batches.
        """
        schedule = self.setup.schedule
        if isinstance(schedule, str):
            return n * len(recomputing(schedule, 1, 1).placement)
        fits = n == len(schedule.lists) and len(self.setup.sizes) <= schedule.micro_batches
        return len(schedule.placement) if fits else 0

    def balance(self, n: int, share: float) -> tuple[int, ...]:
        """Return a balance for `n` devices whose stages all cost about the same.

        A layer's cost is a weighted sum of its seconds and its bytes. If `share` is 0, only seconds
        count. If it is 1, only bytes count.
        """
        all_seconds, all_bytes = self.seconds, self.held
        per_second = (1 - share) / (sum(all_seconds) or 1.0)
        per_byte = share / sum(all_bytes)
        layers = zip(all_seconds, all_bytes, strict=True)
        costs = [per_second * seconds + per_byte * nbytes for seconds, nbytes in layers]
        return tuple(minimise_heaviest(costs, self.stages(n)))

    @functools.cached_property
    def held(self) -> list[float]:
        """For each layer, the least number of bytes that its device needs for it in a step.

        The bytes are counted during the second backward, when gradients of the first one exist. A
        parameter that several layers share counts only for the first of these layers.
        """
        setup, counts = self.setup, self.predictor.counts
        m = len(setup.sizes)
        footprints = counts.footprints(setup.sizes[0])
        # Bytes for each byte of parameters: 1 for the parameters, more for the optimizer's state,
        # and 1 for the gradients. With one micro-batch, gradients do not count, because activations
        # are freed before all gradients exist.
        copies = 1 + setup.optimizer.state
        if m > 1:
            copies += 1
        outputs = kept = 1
        if setup.gathered:
            outputs = m
            kept = max(1, m - 1 - checkpointed(setup.checkpoint, m))
        known = set(footprints[0].inputs)  # The mini-batch counts once, below.
        held = []
        for layer, footprint in zip(counts.once, footprints, strict=True):
            new = set(footprint.saves) - known
            saved = sum([nbytes for storage, nbytes in footprint.sizes if storage in new])
            held.append(layer.parameters * copies + layer.frozen + kept * saved)
            known |= new
        held[0] += counts.inputs(setup.batch_size)
        held[-1] += outputs * footprints[-1].output_grad
        return held


def held_by_layers(layers: Sequence[LayerCount], optimizer: Optimizer) -> list[float]:
    """Return for each layer the bytes of its parameters, gradients, optimizer's state and buffers.

    Parameters that get no gradients count only once, like buffers.
    """
    copies = 2 + optimizer.state  # bytes of memory for each byte of parameters
    return [layer.parameters * copies + layer.frozen for layer in layers]


def heaviest(costs: Sequence[float], balance: Sequence[int]) -> float:
    """Return the cost of a balance's most expensive partition, from the cost of each layer."""
    sums = list(accumulate(costs, initial=0.0))
    partitions = pairwise(accumulate(balance, initial=0))
    return max([sums[stop] - sums[start] for start, stop in partitions])
