"""Predict a training step: seconds and bubble from the layers' counts and a hardware description, by replay.

    setup = Setup(batch_size=512, balance=(104, 137), chunks=32, checkpoint="except_last")
    step = Predictor(counts, hardware).step(setup)    # step.seconds, step.bubble

Layers' seconds are worked out once for each size of micro-batches.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from torchgpipe.engine.arrangement import arranged, overlaps
from torchgpipe.plan.count.count import Counts
from torchgpipe.plan.count.footprint import Footprint, LayerCount, Stashed
from torchgpipe.plan.count.optimizer import STATELESS, Optimizer
from torchgpipe.plan.hardware.hardware import Hardware
from torchgpipe.plan.hardware.operators import Operator
from torchgpipe.plan.replay import Costs, Timeline, recomputing, replay, shared
from torchgpipe.schedules import Schedule
from torchgpipe.tensors.checkpoint import Mode, checkpointed

DEARER = 1.05
"""A backward in halves beside a whole one, in time: 1.02 to 1.08 on tasks of useful size."""


@dataclass(frozen=True)
class Setup:
    """A way to train: a mini-batch's samples, the layers per stage, micro-batches, what is recomputed, the schedule.

    Without `portals`, skips go through every partition between; without `streams`, copies run among the tasks, on both
    sides. With `zeroed`, gradients stay between steps and are set to zero, and those of a step are added to them:
    PyTorch's way before 2.0.
    """

    batch_size: int
    balance: tuple[int, ...]
    chunks: int = 1
    checkpoint: Mode = "except_last"
    optimizer: Optimizer = STATELESS
    portals: bool = True
    streams: bool = True
    zeroed: bool = False
    schedule: str | Schedule = "GPipe"

    @property
    def lists(self) -> Schedule:
        """What devices do, with a recomputation of every task, which takes no time where there is none."""
        return self.lists_of(len(self.sizes))

    def lists_of(self, m: int) -> Schedule:
        """Return what devices do for so many micro-batches."""
        schedule, n, v, _ = arranged(self.schedule, len(self.balance))
        return recomputing(schedule, n, m, v)

    @property
    def gathered(self) -> bool:
        """Whether the backward begins with the whole output, as `loss(model(x))` has it; else a step is `step()`'s."""
        return isinstance(self.schedule, str) and self.schedule.lower() == "gpipe"

    @property
    def halves(self) -> bool:
        """Whether some backwards are in halves."""
        return (
            self.schedule
            if isinstance(self.schedule, Schedule)
            else recomputing(self.schedule, 1, 1)
        ).halves

    @property
    def sizes(self) -> list[int]:
        """The samples of each micro-batch."""
        return micro_batch_sizes(self.batch_size, self.chunks)

    @property
    def cuts(self) -> list[tuple[int, int]]:
        """The first layer of each partition, and the one after its last."""
        return list(pairwise(accumulate(self.balance, initial=0)))


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of each layer for a micro-batch of one size: forward, backward, and adding up gradients."""

    forward: list[float]
    """Without a graph: that of a checkpointed task."""
    graph: list[float]
    """With one: that of a task that is not, and recomputation."""
    backward: list[float]
    weights: list[float]
    """What of a backward is for the weights alone, as far as it can be done apart."""
    accumulate: list[float]
    layers: Sequence[LayerCount]


def micro_batch_sizes(batch_size: int, chunks: int) -> list[int]:
    """Return the samples of each micro-batch, as `torch.chunk` splits: all equal but the last."""
    size = math.ceil(batch_size / chunks)
    whole, rest = divmod(batch_size, size)
    return [size] * whole + [rest] * (rest > 0)


def apart(
    seconds: Sequence[float], products: Sequence[float], backward: Sequence[float]
) -> list[float]:
    """Return what of each layer's `seconds` of backward is for its weights: the share of its products with them."""
    return [
        x * min(1.0, a / (b or 1.0)) for x, a, b in zip(seconds, products, backward, strict=True)
    ]


class Predictor:
    """Predict steps of one model on one node."""

    def __init__(self, counts: Counts, hardware: Hardware) -> None:
        self.counts = counts
        self.hardware = hardware
        self._known: dict[int, LayerSeconds] = {}

    def layers(self, size: int) -> LayerSeconds:
        """Return the seconds of every layer for micro-batches of `size` samples."""
        if size not in self._known:
            self._known[size] = self._timed(size, self.counts.at(size))
        return self._known[size]

    def _timed(self, size: int, layers: Sequence[LayerCount]) -> LayerSeconds:
        forward, backward = (
            self._totals([x.forward for x in layers]),
            self._totals([x.backward for x in layers]),
        )
        weights = apart(backward, self._totals([x.products for x in layers]), backward)
        accumulate = self._totals([x.accumulate for x in layers])
        return LayerSeconds(forward, forward, backward, weights, accumulate, layers)

    def _totals(self, operators: Sequence[tuple[Operator, ...]]) -> list[float]:
        """Return the seconds of each layer's operators. Layers that behave alike share theirs."""
        seconds = {
            key: sum(map(self.hardware.seconds, x))
            for key, x in {id(x): x for x in operators}.items()
        }
        return [seconds[id(x)] for x in operators]

    def costs(self, setup: Setup) -> Costs:
        """Return the seconds of every task and copy."""
        sizes, cuts = setup.sizes, setup.cuts
        if len(self.counts) != sum(setup.balance):
            raise ValueError(
                f"the balance has {sum(setup.balance)} layers, and the model {len(self.counts)}"
            )
        recomputed, lists = checkpointed(setup.checkpoint, len(sizes)), setup.lists
        # The one that goes backward first finds no gradients yet to which its own are added.
        order = [
            action.micro_batch for action in lists.lists[-1] if action.kind.startswith("backward")
        ]
        first = None if setup.zeroed else order[0]
        kinds = [(size, i < recomputed, i == first) for i, size in enumerate(sizes)]
        rows = {kind: self._row(cuts, *kind, setup.halves) for kind in dict.fromkeys(kinds)}
        forward, backward, recompute, weights = map(
            list, zip(*(rows[kind] for kind in kinds), strict=True)
        )
        copies, skips = self.copies(setup)
        # On a CPU, partitions that cannot overlap run one after another, each recomputation right before its backward.
        ahead = not self.hardware.cpu or overlaps(len(sizes), len(lists.lists))
        loss = 0.0 if setup.gathered else None
        return Costs(
            forward, backward, recompute, copies, loss, skips, not setup.streams, ahead, weights
        )

    def _row(
        self,
        cuts: Sequence[tuple[int, int]],
        size: int,
        recomputed: bool,
        first: bool,
        halves: bool,
    ) -> tuple[list[float], ...]:
        """Return a micro-batch's forward, backward, recomputation and backward of weights on each stage.

        `first` is its backward, which is in `halves`.
        """
        layers, dearer = self.layers(size), DEARER if halves else 1.0
        graph = [sum(layers.graph[a:b]) for a, b in cuts]
        forward = [sum(layers.forward[a:b]) for a, b in cuts] if recomputed else graph
        added = [0.0 if first else sum(layers.accumulate[a:b]) for a, b in cuts]
        backward = [
            dearer * sum(layers.backward[a:b]) + more
            for (a, b), more in zip(cuts, added, strict=True)
        ]
        weights = (
            [sum(layers.weights[a:b]) + more for (a, b), more in zip(cuts, added, strict=True)]
            if halves
            else []
        )
        return forward, backward, graph if recomputed else [0.0] * len(cuts), weights

    def copies(self, setup: Setup) -> tuple[list[float], dict[tuple[int, int], float]]:
        """Return the seconds of each boundary's copy, and of the skips that go from one partition to another."""
        layers, footprints = (
            self.layers(setup.sizes[0]).layers,
            self.counts.footprints(setup.sizes[0]),
        )
        cuts = setup.cuts
        through = [layers[b - 1].output for _, b in cuts[:-1]]
        beside: dict[tuple[int, int], float] = {}
        for source, target, stashed in crossing(footprints, cuts):
            if setup.portals:
                beside[source, target] = beside.get((source, target), 0.0) + stashed.copied
            else:
                for j in range(source, target):
                    through[j] += stashed.copied
        transfer, at = (
            self.hardware.transfer,
            setup.lists.placement,
        )  # on one device, nothing is copied
        through = [x * (at[j] != at[j + 1]) for j, x in enumerate(through)]
        return [transfer(x) for x in through], {
            (a, b): transfer(x) for (a, b), x in beside.items() if at[a] != at[b]
        }

    def step(self, setup: Setup) -> Timeline:
        """Predict one step: after its tasks its seconds go on for the optimizer, with setting to zero."""
        layers = self.layers(setup.sizes[0]).layers
        lists = setup.lists
        weights = [0.0] * len(lists.lists)
        for d, (a, b) in zip(lists.placement, setup.cuts, strict=True):
            weights[d] += sum(layer.parameters for layer in layers[a:b])
        timeline = replay(self.costs(setup), lists)
        if self.hardware.sharing:
            timeline = shared(timeline, self.hardware.sharing)
        return replace(timeline, seconds=timeline.seconds + self.update(setup, weights))

    def update(self, setup: Setup, parameters: Sequence[float]) -> float:
        """Return the seconds of the optimizer's step, from each partition's bytes."""
        if not setup.optimizer.updates:
            return 0.0
        # GPUs update theirs at the same time; on a CPU one thread updates all, one after another.
        updated = sum(parameters) if self.hardware.cpu else max(parameters)
        # It reads the parameter and its gradient and writes the parameter; and reads and writes each state.
        moved = 3.0 + 2.0 * setup.optimizer.state + (1.0 if setup.zeroed else 0.0)
        return self.hardware.seconds(Operator("elementwise", "float32", 0.0, moved * updated))


def crossing(
    layers: Sequence[Footprint], cuts: Sequence[tuple[int, int]]
) -> list[tuple[int, int, Stashed]]:
    """List the skips that cross partitions: where they are stashed, where they are popped, and what they are."""
    popped = {
        skip: j for j, (a, b) in enumerate(cuts) for layer in layers[a:b] for skip in layer.pops
    }
    stashed = [
        (j, x) for j, (a, b) in enumerate(cuts) for layer in layers[a:b] for x in layer.stashes
    ]
    return [(j, popped[x.skip], x) for j, x in stashed if popped[x.skip] != j]
