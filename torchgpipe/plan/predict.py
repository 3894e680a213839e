"""Predict a training step: seconds and bubble from the layers' counts and a hardware description, by replay.

    setup = Setup(batch_size=512, balance=(104, 137), chunks=32, checkpoint="except_last")
    step = Predictor(counts, hardware).step(setup)    # step.seconds, step.bubble

Layers' seconds are worked out once for each size of micro-batches.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torchgpipe.engine.schedule import overlaps
from torchgpipe.plan.count.count import Counts
from torchgpipe.plan.count.footprint import Footprint, LayerCount, Stashed
from torchgpipe.plan.count.optimizer import STATELESS, Optimizer
from torchgpipe.plan.hardware.hardware import Hardware
from torchgpipe.plan.hardware.operators import Operator
from torchgpipe.plan.replay import Costs, Timeline, replay, shared
from torchgpipe.tensors.checkpoint import Mode, checkpointed


@dataclass(frozen=True)
class Setup:
    """A way to train: a mini-batch's samples, the layers per partition, micro-batches, and what is recomputed.

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

    @property
    def sizes(self) -> list[int]:
        """The samples of each micro-batch."""
        return micro_batch_sizes(self.batch_size, self.chunks)

    @property
    def cuts(self) -> list[tuple[int, int]]:
        """The first layer of each partition, and the one after its last."""
        return list(pairwise(accumulate(self.balance, initial=0)))


@dataclass(frozen=True)
class PredictedStep:
    """A predicted step: its timeline, and the seconds that the optimizer takes after it, with setting to zero."""

    timeline: Timeline
    optimizer: float

    @property
    def seconds(self) -> float:
        """The seconds of the whole step."""
        return self.timeline.seconds + self.optimizer

    @property
    def bubble(self) -> float:
        """The share of the devices' time, during forward and backward, in which they wait."""
        return self.timeline.bubble


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of each layer for a micro-batch of one size: forward, backward, and adding up gradients."""

    forward: list[float]
    """Without a graph: that of a checkpointed task."""
    graph: list[float]
    """With one: that of a task that is not, and recomputation."""
    backward: list[float]
    accumulate: list[float]
    layers: Sequence[LayerCount]


def micro_batch_sizes(batch_size: int, chunks: int) -> list[int]:
    """Return the samples of each micro-batch, as `torch.chunk` splits: all equal but the last."""
    size = math.ceil(batch_size / chunks)
    whole, rest = divmod(batch_size, size)
    return [size] * whole + [rest] * (rest > 0)


class Predictor:
    """Predict steps of one model on one node."""

    def __init__(self, counts: Counts, hardware: Hardware) -> None:
        self.counts = counts
        self.hardware = hardware
        self._known: dict[int, LayerSeconds] = {}

    def layers(self, size: int) -> LayerSeconds:
        """Return the seconds of every layer for micro-batches of `size` samples."""
        if size not in self._known:
            layers = self.counts.at(size)
            accumulate = self._totals([layer.accumulate for layer in layers])
            self._known[size] = LayerSeconds(*self._timed(size, layers), accumulate, layers)
        return self._known[size]

    def _timed(self, size: int, layers: Sequence[LayerCount]) -> tuple[list[float], list[float], list[float]]:
        """Return the layers' seconds of a forward without a graph, of one with it, and of a backward."""
        forward = self._totals([layer.forward for layer in layers])
        return forward, forward, self._totals([layer.backward for layer in layers])

    def _totals(self, operators: Sequence[tuple[Operator, ...]]) -> list[float]:
        """Return the seconds of each layer's operators. Layers that behave alike share theirs."""
        seconds = {key: self.hardware.total(x) for key, x in {id(x): x for x in operators}.items()}
        return [seconds[id(x)] for x in operators]

    def costs(self, setup: Setup) -> Costs:
        """Return the seconds of every task and copy."""
        sizes, cuts = setup.sizes, setup.cuts
        if len(self.counts) != sum(setup.balance):
            raise ValueError(f"the balance has {sum(setup.balance)} layers, and the model {len(self.counts)}")
        recomputed = checkpointed(setup.checkpoint, len(sizes))
        # The last one goes backward first: there are no gradients yet to which its own are added.
        first = None if setup.zeroed else len(sizes) - 1
        kinds = [(size, i < recomputed, i == first) for i, size in enumerate(sizes)]
        rows = {kind: self._row(cuts, *kind) for kind in dict.fromkeys(kinds)}
        forward, backward, recompute = map(list, zip(*(rows[kind] for kind in kinds), strict=True))
        copies, skips = self.copies(setup)
        # On a CPU, partitions that cannot overlap run one after another, each recomputation right before its backward.
        ahead = not self.hardware.cpu or overlaps(len(sizes), len(cuts))
        return Costs(forward, backward, recompute, copies, skips=skips, blocking=not setup.streams, ahead=ahead)

    def _row(
        self, cuts: Sequence[tuple[int, int]], size: int, recomputed: bool, first: bool
    ) -> tuple[list[float], list[float], list[float]]:
        """Return a micro-batch's forward, backward and recomputation on each partition; `first` is its backward."""
        layers = self.layers(size)
        graph = [sum(layers.graph[a:b]) for a, b in cuts]
        forward = [sum(layers.forward[a:b]) for a, b in cuts] if recomputed else graph
        backward = [sum(layers.backward[a:b]) + (0.0 if first else sum(layers.accumulate[a:b])) for a, b in cuts]
        return forward, backward, graph if recomputed else [0.0] * len(cuts)

    def copies(self, setup: Setup) -> tuple[list[float], dict[tuple[int, int], float]]:
        """Return the seconds of each boundary's copy, and of the skips that go from one partition to another."""
        layers = self.layers(setup.sizes[0]).layers
        cuts = setup.cuts
        through = [layers[b - 1].output for _, b in cuts[:-1]]
        beside: dict[tuple[int, int], float] = {}
        for source, target, stashed in crossing(layers, cuts):
            if setup.portals:
                beside[source, target] = beside.get((source, target), 0.0) + stashed.bytes
            else:
                for j in range(source, target):
                    through[j] += stashed.bytes
        transfer = self.hardware.transfer
        return [transfer(x) for x in through], {pair: transfer(x) for pair, x in beside.items()}

    def step(self, setup: Setup) -> PredictedStep:
        """Predict one step."""
        layers = self.layers(setup.sizes[0]).layers
        weights = [sum(layer.parameters for layer in layers[a:b]) for a, b in setup.cuts]
        timeline = replay(self.costs(setup))
        if self.hardware.sharing:
            timeline = shared(timeline, self.hardware.sharing)
        return PredictedStep(timeline, self.update(setup, weights))

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
    layers: Sequence[LayerCount | Footprint], cuts: Sequence[tuple[int, int]]
) -> list[tuple[int, int, Stashed]]:
    """List the skips that cross partitions: where they are stashed, where they are popped, and what they are."""
    popped = {skip: j for j, (a, b) in enumerate(cuts) for layer in layers[a:b] for skip in layer.pops}
    stashed = [(j, x) for j, (a, b) in enumerate(cuts) for layer in layers[a:b] for x in layer.stashes]
    return [(j, popped[x.skip], x) for j, x in stashed if popped[x.skip] != j]
