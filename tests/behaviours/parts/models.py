"""`Case`, which describes a randomly generated test model and the training steps to run with it."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...library.layers import same
from ..rows.between.modes import Functions, Operators, in_float64, once
from ..rows.buffers.held import LARGE, Holds, another, by_data, in_place, own_norm
from ..rows.random.draws import set_back
from .draw import Draw
from .kinds import KINDS, OF_SEVERAL, TO_SEVERAL
from .layers import WIDTH, Do, shared_parts
from .wiring import POPS, STASHES, OnFirst, Pops, Stashes, with_skips


def computed(x: Tensor) -> Tensor:
    return 2 * x


def with_integers(x: Tensor) -> tuple[Tensor, ...]:
    return x, torch.arange(len(x))


def twice(x: Tensor) -> tuple[Tensor, ...]:
    return x, x


INPUTS: dict[str, Callable[[Tensor], Tensor | tuple[Tensor, ...]]] = {
    "no gradient": same,
    "gradient": same,
    "computed": computed,
    "with integers": with_integers,
    "twice": twice,
}
"""Functions that make an input of each kind from a leaf tensor."""


# More kinds of layers: layers of test cases, changed for 64-bit numbers and for a single sample.


def by_numpy(layer: Any) -> None:
    array = layer.buffer.numpy()
    array += 1


def drawn_in_float32(x: Tensor) -> Tensor:
    return set_back(x.detach().float()).double()


def norm_of_more(self: Any, x: Tensor) -> Tensor:
    """Apply the layer's norm to the input and to a scaled copy of it. Return the normalized input.

    The copy makes the batch larger, because a norm needs at least two samples.
    """
    more = torch.cat([x, 2 * x])
    y: Tensor = self.norm(more)
    return y[: len(x)]


def times_taking(self: Any, x: Tensor) -> Tensor:
    return x * self.taking[:1]


def with_gradient(size: int, _: Any) -> nn.Module:
    buffer = torch.ones(size).double().requires_grad_()
    return Do(times_taking, taking=buffer)


def holds(change: Callable[[Any], object], size: int, _: Any) -> nn.Module:
    return Holds(change, size)


KINDS["dropout, set back"] = lambda parts: Draw(drawn_in_float32)
KINDS["own norm"] = lambda parts: Do(norm_of_more, norm=own_norm())
for size in (2, LARGE):
    KINDS[f"gradient of {size} elements"] = partial(with_gradient, size)
    for change in (in_place, by_data, by_numpy, another):
        KINDS[f"{change.__name__}, {size} elements"] = partial(holds, change, size)


class Watching(Functions):
    """A PyTorch mode that only counts calls, so that worker threads may use it at the same time.

    Its attribute `only_watches` says so. Without this attribute, a pipeline with worker threads
    would raise an error.
    """

    only_watches = True


AROUND: dict[str, Callable[[], Any]] = {
    "": nullcontext,
    "functions": Functions,
    "operators": Operators,
    "a type": in_float64,
    "a count": partial(Watching, once),
    "a device": partial(torch.device, "meta"),
}
"""Functions that make the PyTorch mode around a forward or a backward."""

FORKS = TO_SEVERAL | {"squares", "half detached", "transformer", "swap", "own norm"}
USE_TWICE = {
    "tied",
    "shared",
    "shared norm",
    "borrowed",
    "lstm",
    "embedding",
    "pruned",
    "spectral norm",
    "spectral norm, by a hook",
    "checkpointed, reentrant",
    "two forwards",
}


@dataclass(frozen=True)
class Skip:
    """A skip connection between two layers.

    Attributes:
        source: The index of the layer that stashes (stores) the skip.
        target: The index of the layer that pops (takes) the skip.
        stash: What the source stores, a key of `STASHES`.
        pop: How the target uses the skip, a key of `POPS`.
    """

    source: int
    target: int
    stash: str
    pop: str


@dataclass(frozen=True)
class Step:
    """A step of training or evaluation.

    Attributes:
        run: How to run forward and backward, a key of `strategy.RUNS`.
        after: What to do after backward, one of `strategy.AFTER`.
        training: Whether the model is in training mode.
        every: Which parameters a step that freezes or unfreezes changes: 1 stands for all
            parameters, 2 for every second one, and so on.
        modes: The names of two PyTorch modes: one around forward, and one around backward. They are
            keys of `AROUND`.
    """

    run: str = "backward"
    after: str = "update"
    training: bool = True
    every: int = 1
    modes: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class Case:
    """A generated test case: a model, its kind of input, options of `GPipe`, and steps to run."""

    kinds: tuple[str, ...]
    balance: tuple[int, ...]
    skips: tuple[Skip, ...] = ()
    input: str = "no gradient"
    batch: int = 2
    chunks: int = 2
    engine: str = "graph"
    checkpoint: str = "never"
    deferred_batch_norm: bool = False
    portals: bool = True
    dependency: bool = True
    observed: bool = False
    steps: tuple[Step, ...] = (Step(),)
    seed: int = 0

    def build(self) -> nn.Sequential:
        """Build the model. Each call returns new layers with the same values of parameters."""
        torch.manual_seed(self.seed)
        parts = shared_parts().double()
        several = self.input in ("with integers", "twice")
        layers: list[nn.Module] = []
        for k, kind in enumerate(self.kinds):
            layer = KINDS[kind](parts)
            if several and kind not in OF_SEVERAL:
                layer = OnFirst(layer)
            stashes, pops = self._skips_of(k)
            if stashes or pops:
                layer = with_skips(layer, stashes, pops)
            layers.append(layer)
            remain = several and not kind.startswith("sum")
            several = remain or kind in TO_SEVERAL or self._returns_a_skip(k)
        return nn.Sequential(*layers).double()

    def _skips_of(self, k: int) -> tuple[Stashes, Pops]:
        """Return what layer `k` stashes and pops."""
        stashes: dict[str, Any] = {}
        pops: dict[str, Any] = {}
        for number, skip in enumerate(self.skips):
            name = f"skip {number}"
            if skip.source == k:
                stashes[name] = STASHES[skip.stash]
            if skip.target == k:
                pops[name] = POPS[skip.pop]
        return stashes, pops

    def _returns_a_skip(self, k: int) -> bool:
        """Return whether layer `k` returns a skip beside its output."""
        for skip in self.skips:
            if skip.target == k and skip.pop == "return both" and skip.stash != "nothing":
                return True
        return False

    def leaf(self) -> Tensor:
        x = torch.randn(self.batch, WIDTH, dtype=torch.float64)
        return x.requires_grad_(self.input != "no gradient")

    def options(self) -> dict[str, Any]:
        names = ["chunks", "engine", "checkpoint", "deferred_batch_norm"]
        if self.engine != "ranks":
            names += ["portals", "dependency"]
        return {name: getattr(self, name) for name in names}

    def has(self, *what: str) -> bool:
        """Return whether this test case has at least one of the given features.

        Args:
            *what: The features: kinds of layers, ways in which a step is run, or modes of a step.
                "in place" means any layer, or any pop of a skip, that changes a tensor in place.
        """
        there = {*self.kinds}
        for step in self.steps:
            there |= {step.run, *step.modes}
        uses = [*self.kinds, *(skip.pop for skip in self.skips)]
        if any("in place" in use for use in uses):
            there.add("in place")
        return not there.isdisjoint(what)

    @property
    def reorders(self) -> bool:
        """Whether the pipeline may add up numbers in another order than layers without a pipeline.

        Then results are equal only up to rounding. The order can differ in two cases: more than two
        gradients of a tensor are added up, or the pipeline uses deferred batch norm.
        """
        forks = sum(kind in FORKS for kind in self.kinds) + len(self.skips)
        if self.input == "twice":
            forks += 1
        return forks > 1 or self.has(*USE_TWICE) or self.deferred_batch_norm
