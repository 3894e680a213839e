"""Compute the bytes of a stage's tasks, of its parameters, and of its skips to other stages."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from torchgpipe.plan.count.count import Counts
from torchgpipe.plan.count.footprint import Footprint, LayerCount, Stashed
from torchgpipe.plan.count.tied import counted_once
from torchgpipe.plan.predict.between import Cuts
from torchgpipe.plan.predict.setup import Setup
from torchgpipe.tensors.checkpoint import checkpointed

Routes = Mapping[tuple[int, int], tuple[float, float]]
"""For a stage that stashes and a stage that pops, the bytes of their skips and of the gradients."""


def routes_of(crossings: Iterable[tuple[int, int, Stashed]]) -> Routes:
    """Return for each pair of stages the bytes of the skips from the first stage to the second.

    Args:
        crossings: The skips, each with the stage that stashes it and the stage that pops it.

    Returns:
        A dictionary from pairs of stages to pairs of numbers: the bytes of all their skips, and of
        the gradients of these skips.
    """
    routes: dict[tuple[int, int], tuple[float, float]] = {}
    for source, target, skip in crossings:
        nbytes, grad = routes.get((source, target), (0.0, 0.0))
        routes[source, target] = nbytes + skip.bytes, grad + skip.grad
    return routes


class StageKey(NamedTuple):
    """The values that decide the bytes of a stage. They are the key in a cache of these bytes."""

    size: int
    start: int
    stop: int
    recomputed: bool
    """Whether some tasks are checkpointed."""
    plain: bool
    """Whether the bytes of tasks without checkpointing are needed."""
    halves: bool


def _gradients(stages: Mapping[int, Sequence[LayerCount]]) -> dict[int, float]:
    """Return the bytes of gradients that each stage's first backward allocates on one device.

    If several stages share a parameter, the last of them allocates the gradient, because its
    backward runs first.

    Args:
        stages: For each stage on the device, the layers of the stage.
    """
    found = dict.fromkeys(stages, 0.0)
    later: list[LayerCount] = []
    for s in sorted(stages, reverse=True):
        both = [*later, *stages[s]]
        once = counted_once(both)[len(later) :]
        found[s] = float(sum([layer.parameters for layer in once]))
        later = both
    return found


class HeldBytes(NamedTuple):
    """The bytes that the parameters and buffers of all stages on one device take."""

    sizes: list[float]
    """The bytes of each parameter that gets a gradient."""
    frozen: float
    gradients: dict[int, float]
    """The bytes of gradients that each stage's first backward adds."""

    @classmethod
    def of(cls, counts: Counts, cuts: Cuts, own: Sequence[int]) -> "HeldBytes":
        """Return the bytes of parameters and buffers of the stages on one device.

        The result is kept in `counts.cache`, because the same stages occur in many setups.

        Args:
            counts: The counts of the model.
            cuts: The range of layers of each stage of the model.
            own: The stages on the device.
        """
        key = cls, tuple([cuts[s] for s in own])
        if key not in counts.cache:
            stages = {s: counts.low[slice(*cuts[s])] for s in own}
            sizes: list[float] = []
            frozen = 0.0
            for layer in counted_once([*chain.from_iterable(stages.values())]):
                sizes += layer.parameter_sizes
                frozen += layer.frozen
            counts.cache[key] = sizes, frozen, [*_gradients(stages).values()]
        sizes, frozen, gradients = counts.cache[key]
        return cls(sizes, frozen, dict(zip(own, gradients, strict=True)))


class StageBytes:
    """The bytes that a task of one stage takes, with and without checkpointing."""

    def __init__(self, counts: Counts, key: "StageKey") -> None:
        size, start, stop, recomputed, plain, halves = key
        # `counts.task` is slow. So call it a second time, for tasks without checkpointing, only if
        # the result is needed.
        self.checkpointed = counts.task(size, start, stop, checkpoint=recomputed)
        self.plain = self.checkpointed
        if plain:
            self.plain = counts.task(size, start, stop, checkpoint=False)
        layers = counts.low[start:stop]
        self.largest = 0.0
        for layer in layers:
            self.largest = max(self.largest, *layer.parameter_sizes, 0.0)
        # The half of a backward that computes the weights' gradients needs two kinds of tensors:
        # those that layers with matrix products have saved, and the gradients of these layers'
        # outputs.
        late: list[Footprint] = []
        if halves:
            footprints = counts.footprints(size)[start:stop]
            for footprint, layer in zip(footprints, layers, strict=True):
                if layer.products:
                    late.append(footprint)
        self.output_grads = sum(footprint.output_grad for footprint in late)
        saved: dict[int, float] = {}
        for footprint in late:
            saves = footprint.saves
            saved |= {storage: size for storage, size in footprint.sizes if storage in saves}
        self.half = sum(saved.values()) + self.output_grads
        """The bytes that a task keeps until the weights' gradients are computed."""

    @classmethod
    def of(cls, counts: Counts, setup: Setup, s: int) -> "StageBytes":
        """Return the bytes that a task of stage `s` takes, with and without checkpointing.

        The result is kept in `counts.cache`, because the same stages occur in many setups.

        Args:
            counts: The operators and tensors that were counted in the model's layers.
            setup: The balance, the micro-batches, the checkpoint mode and the schedule.
            s: The number of the stage.
        """
        start, stop = setup.cuts[s]
        sizes = setup.sizes
        recomputed = checkpointed(setup.checkpoint, len(sizes))
        plain = recomputed < len(sizes) or start == 0
        key = StageKey(sizes[0], start, stop, recomputed > 0, plain, setup.halves)
        if key not in counts.cache:
            counts.cache[key] = cls(counts, key)
        found: StageBytes = counts.cache[key]
        return found

    def stashed(self, recomputed: int, plain: int, later: int = 0) -> float:
        """Return the bytes that tasks keep from their forward until their backward has ended.

        Args:
            recomputed: The number of these tasks that are checkpointed.
            plain: The number of these tasks that are not checkpointed.
            later: The number of tasks that have computed the gradients of their inputs, but not yet
                those of their weights.
        """
        return recomputed * self.checkpointed.inputs + plain * self.plain.kept + later * self.half
