"""Predict the seconds and the bubble of a training step, by replaying its schedule.

    setup = Setup(batch_size=512, balance=(104, 137), chunks=32, checkpoint="except_last")
    step = Predictor(counts, hardware).step(setup)    # step.seconds, step.bubble

The seconds of a layer are computed from its counted operators and a hardware description, only once
for each micro-batch size.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from torchgpipe.engine.arrangement import overlaps
from torchgpipe.plan.count.count import Counts
from torchgpipe.plan.count.footprint import LayerCount
from torchgpipe.plan.count.tied import counted_once
from torchgpipe.plan.hardware.hardware import Hardware
from torchgpipe.plan.hardware.operators import Operator
from torchgpipe.plan.predict.between import Cuts, all_reduce, crossing, exchanged_parameters
from torchgpipe.plan.predict.replay import Costs, Timeline, replay, shared
from torchgpipe.plan.predict.setup import Setup
from torchgpipe.tensors.checkpoint import checkpointed

Seconds = list[float]
DEARER = 1.05
"""How many times longer a backward takes if it is split into two halves.

Measurements gave 1.02 to 1.08 for tasks of useful size.
"""


@dataclass(frozen=True)
class LayerSeconds:
    """The seconds of each layer's forward and backward, for micro-batches of one size."""

    forward: Seconds
    """The seconds of a forward without an autograd graph, like in a checkpointed task."""
    graph: Seconds
    """The seconds of a forward with a graph: a recomputation, or a task without checkpointing."""
    backward: Seconds
    weights: Seconds
    """The part of `backward` for the weights' gradients, if they are computed separately."""
    accumulate: Seconds
    """The seconds of adding parameters' gradients to the gradients of earlier micro-batches."""
    layers: Sequence[LayerCount]


class LossSeconds(NamedTuple):
    """The seconds to compute the loss from outputs, and to compute the outputs' gradients."""

    forward: float
    backward: float


def apart(
    seconds: Sequence[float], products: Sequence[float], backward: Sequence[float]
) -> Seconds:
    """Return for each layer how many seconds of its backward compute the gradients of its weights.

    These seconds are a share of the whole backward: `products` / `backward`, but at most 1.

    Args:
        seconds: The seconds of each layer's whole backward.
        products: The cost of each layer's matrix products with weights, in seconds or operations.
        backward: The cost of each layer's whole backward, in the same unit as `products`.
    """
    found = []
    for layer, product, whole in zip(seconds, products, backward, strict=True):
        share = min(1.0, product / (whole or 1.0))
        found.append(layer * share)
    return found


class Predictor:
    """Predict the seconds of training steps of one model on one node, with any setup.

    Args:
        counts: The model's layers, with the operations and bytes counted for each layer.
        hardware: The node.
    """

    def __init__(self, counts: Counts, hardware: Hardware) -> None:
        self.counts = counts
        self.hardware = hardware
        self._known: dict[int, LayerSeconds] = {}

    @functools.cached_property
    def _of_loss(self) -> "Predictor | None":
        """A predictor for the criterion as the only layer; `None` if no criterion was given."""
        loss = self.counts.loss
        return None if loss is None else Predictor(loss, self.hardware)

    @property
    def with_loss(self) -> bool:
        """Whether predictions include the loss, because a criterion was given."""
        return self._of_loss is not None

    def loss(self, size: int) -> LossSeconds:
        """Return the seconds of the loss for `size` samples. Without a criterion, they are 0."""
        if self._of_loss is None:
            return LossSeconds(0.0, 0.0)
        layers = self._of_loss.layers(size)
        return LossSeconds(layers.graph[0], layers.backward[0])

    def layers(self, size: int) -> LayerSeconds:
        """Return the seconds of every layer for micro-batches of `size` samples."""
        if size not in self._known:
            self._known[size] = self._timed(size, self.counts.at(size))
        return self._known[size]

    def _timed(self, size: int, layers: Sequence[LayerCount]) -> LayerSeconds:
        forward = self._totals([layer.forward for layer in layers])
        backward = self._totals([layer.backward for layer in layers])
        products = self._totals([layer.products for layer in layers])
        weights = apart(backward, products, backward)
        added = self._totals([layer.accumulate for layer in layers])
        return LayerSeconds(forward, forward, backward, weights, added, layers)

    def _totals(self, layers: Sequence[tuple[Operator, ...]]) -> Seconds:
        """Return the seconds of each layer: the sum of the seconds of its operators.

        Layers that behave alike share one tuple of operators. The sum for this tuple is computed
        only once, to save time.
        """
        known: dict[int, float] = {}
        for operators in layers:
            if id(operators) not in known:
                known[id(operators)] = sum(map(self.hardware.seconds, operators))
        return [known[id(operators)] for operators in layers]

    def costs(self, setup: Setup) -> Costs:
        """Return the seconds of every task and of every copy in a step with this setup.

        Raises:
            ValueError: If the sum of the balance is not the model's number of layers.
        """
        sizes, cuts, schedule = setup.sizes, setup.cuts, setup.full_schedule
        balanced = sum(setup.balance)
        if len(self.counts) != balanced:
            raise ValueError(f"the balance has {balanced} layers, and the model {len(self.counts)}")
        recomputed = checkpointed(setup.checkpoint, len(sizes))
        halves = setup.halves
        # A backward adds its gradients to those of earlier micro-batches, which takes time. The
        # first backward of a step finds no gradients, and so adds nothing. But if `zeroed` is true,
        # gradients are set to zero between steps and not freed, so the first backward adds, too.
        backwards = [action for action in schedule.lists[-1] if action.kind.startswith("backward")]
        first = None if setup.zeroed else backwards[0].micro_batch
        known: dict[tuple[int, bool, bool], tuple[Seconds, ...]] = {}
        rows = []
        for i, size in enumerate(sizes):
            kind = size, i < recomputed, i == first
            if kind not in known:
                known[kind] = self._row(cuts, *kind, halves=halves)
            rows.append(known[kind])
        forward, backward, recompute, weights = map(list, zip(*rows, strict=True))
        loss = None
        losses = [self.loss(size) for size in sizes]
        if setup.gathered:
            loss = sum(map(sum, losses))
        else:
            for i, each in enumerate(losses):
                forward[i] = [*forward[i][:-1], forward[i][-1] + each.forward]
                backward[i] = [*backward[i][:-1], backward[i][-1] + each.backward]
        copies, skips = self.copies(setup)
        return Costs(
            forward,
            backward,
            recompute,
            copies,
            loss=loss,
            skips=skips,
            blocking=not setup.streams,
            # On a CPU, if partitions cannot run at the same time, they run one after another: a
            # recomputation then comes after the backward of the next partition.
            ahead=not self.hardware.cpu or overlaps(len(sizes), len(schedule.lists)),
            weights=weights,
        )

    def _row(
        self, cuts: Cuts, size: int, recomputed: bool, first: bool, *, halves: bool
    ) -> tuple[Seconds, ...]:
        """Return the seconds of one micro-batch's tasks, as lists with an item for each stage.

        Args:
            cuts: The range of layers of each stage.
            size: The number of samples in the micro-batch.
            recomputed: Whether the micro-batch is checkpointed.
            first: Whether these are the first backwards, which add to no earlier gradients.
            halves: Whether backwards are split into two halves.

        Returns:
            Four lists: the seconds of forwards, of whole backwards, of recomputations, and of the
            halves of backwards that compute the weights' gradients. The last list is empty if
            backwards are not split.
        """
        layers = self.layers(size)
        dearer = DEARER if halves else 1.0
        graph = [sum(layers.graph[a:b]) for a, b in cuts]
        forward, recompute = graph, [0.0] * len(cuts)
        if recomputed:
            forward, recompute = [sum(layers.forward[a:b]) for a, b in cuts], graph
        backward, weights = [], []
        for a, b in cuts:
            added = 0.0 if first else sum(layers.accumulate[a:b])
            backward.append(dearer * sum(layers.backward[a:b]) + added)
            if halves:
                weights.append(sum(layers.weights[a:b]) + added)
        return forward, backward, recompute, weights

    def copies(self, setup: Setup) -> tuple[Seconds, dict[tuple[int, int], float]]:
        """Return the seconds of copying outputs between partitions, and of copying skips.

        Returns:
            A list with the seconds of a copy from each partition to the next, and a dictionary with
            the seconds of copying skips. The keys of the dictionary are pairs: the partition that
            stashes the skips, and the partition that pops them.
        """
        size, cuts = setup.sizes[0], setup.cuts
        layers = self.layers(size).layers
        through = [layers[stop - 1].output for _, stop in cuts[:-1]]
        beside: dict[tuple[int, int], float] = {}
        for source, target, skip in crossing(self.counts.skips(size), cuts):
            if setup.portals:
                beside[source, target] = beside.get((source, target), 0.0) + skip.copied
            else:
                for j in range(source, target):
                    through[j] += skip.copied
        transfer = self.hardware.transfer
        placement = setup.full_schedule.placement
        copies = []
        for (here, there), nbytes in zip(pairwise(placement), through, strict=True):
            copies.append(transfer(nbytes) if here != there else 0.0)
        skips = {}
        for (source, target), nbytes in beside.items():
            if placement[source] != placement[target]:
                skips[source, target] = transfer(nbytes)
        return copies, skips

    def step(self, setup: Setup) -> Timeline:
        """Predict one training step with a setup: its timeline and its seconds.

        The seconds include what follows the last task: devices that share parameters exchange the
        gradients of these parameters, and the optimizer does its step.
        """
        layers = self.layers(setup.sizes[0]).layers
        schedule = setup.full_schedule
        own: list[list[LayerCount]] = [[] for _ in schedule.lists]
        for device, (start, stop) in zip(schedule.placement, setup.cuts, strict=True):
            own[device] += layers[start:stop]
        parameters = []
        for of_device in own:
            held = counted_once(of_device)
            parameters.append(float(sum([layer.parameters for layer in held])))
        timeline = replay(self.costs(setup), schedule)
        if self.hardware.sharing:
            timeline = shared(timeline, self.hardware.sharing)
        after = self.exchange(setup) + self.update(setup, parameters)
        return replace(timeline, seconds=timeline.seconds + after)

    def exchange(self, setup: Setup) -> float:
        """Return the seconds in which devices exchange gradients of the parameters that they share.

        After the last backward, the gradients are summed over the devices by a ring all-reduce (see
        `all_reduce`).
        """
        seconds = 0.0
        parameters = exchanged_parameters(
            self.counts.low, setup.cuts, setup.full_schedule.placement
        )
        for tied, devices in parameters.items():
            seconds += all_reduce(self.hardware, tied.bytes, len(devices))
        return seconds

    def update(self, setup: Setup, parameters: Sequence[float]) -> float:
        """Return the seconds that the optimizer's step takes.

        `parameters` has the bytes of each device's parameters.

        If gradients stay allocated between steps (`setup.zeroed`), the seconds include setting them
        to zero.
        """
        optimizer, hardware = setup.optimizer, self.hardware
        if not optimizer.updates:
            return 0.0
        # GPUs update at the same time. On a CPU, one thread updates the parameters of all devices.
        updated = sum(parameters) if hardware.cpu else max(parameters)
        # The optimizer's step reads the parameters and the gradients, and writes the parameters. So
        # it moves three times the parameters' bytes. It also reads and writes its own state.
        moved = 3.0 + 2.0 * optimizer.state
        if setup.zeroed:
            moved += 1.0
        return hardware.seconds(Operator("elementwise", "float32", 0.0, moved * updated))
