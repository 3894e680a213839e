"""`Case`, a generated model and how it is run, and `cases()`, the hypothesis strategy for it."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from ..rows.between.modes import Functions, Operators, in_float64, once
from ..rows.buffers.held import LARGE, Holds, another, by_data, in_place, own_norm
from ..rows.random.draws import set_back
from .draw import Draw
from .layers import KINDS, OF_SEVERAL, TO_SEVERAL, WIDTH, Do, shared_parts
from .wiring import POPS, STASHES, OnFirst, with_skips

# kind of input -> the input, made from a leaf tensor.
INPUTS: dict[str, Callable[[Tensor], Tensor | tuple[Tensor, ...]]] = {
    "no gradient": lambda x: x,
    "gradient": lambda x: x,
    "computed": lambda x: 2 * x,
    "with integers": lambda x: (x, torch.arange(len(x))),
    "twice": lambda x: (x, x),
}

# The ways to run a step. To each belong the layers that are not drawn together with it: PyTorch itself refuses them,
# computes something wrong or warns; or they have an unregistered parameter, which autograd.grad(…) does not find.
RUNS: dict[str, set[str]] = {
    "backward": set(),
    "no grad": set(),
    "inference": set(),
    "no backward": set(),
    "backward twice": set(),
    "evaluation between": set(),
    "changed between": {"checkpointed, reentrant", "checkpointed", "borrowed"},
    "frozen between": {"checkpointed, reentrant", "checkpointed", "borrowed"},
    "two forwards": set(),
    "autograd.grad": {"checkpointed, reentrant", "borrowed"},
    "inputs": {"checkpointed, reentrant", "borrowed"},
    "functional_call": {
        "checkpointed, reentrant",
        "checkpointed",
        "shared",
        "shared norm",
        "borrowed",
        "as weights",
    },
}
AFTER = ["update", "update, zero", "accumulate", "freeze", "reload"]


def by_numpy(layer: Any) -> None:
    array = layer.buffer.numpy()
    array += 1


# Layers of rows, for numbers of 64 bits, and for a single sample.
KINDS["dropout, set back"] = lambda _: Draw(lambda x: set_back(x.detach().float()).double())
KINDS["own norm"] = lambda _: Do(
    lambda self, x: self.norm(torch.cat([x, 2 * x]))[: len(x)], norm=own_norm()
)
for size in (2, LARGE):
    KINDS[f"gradient of {size} elements"] = (
        lambda _, size=size: Do(  # type: ignore[misc]
            lambda self, x: x * self.taking[:1], taking=torch.ones(size).double().requires_grad_()
        )
    )
    for change in (in_place, by_data, by_numpy, another):
        KINDS[f"{change.__name__}, {size} elements"] = partial(
            lambda change, size, _: Holds(change, size), change, size
        )

# Modes around a forward or a backward, not drawn with layers that PyTorch itself recomputes without them.
AROUND: dict[str, Callable[[], Any]] = {
    "": nullcontext,
    "functions": Functions,
    "operators": Operators,
    "a type": in_float64,
    "a count": lambda: type("Counts", (Functions,), {"only_watches": True})(once),
    "a device": partial(torch.device, "meta"),
}
WITHOUT_MODES = {
    "checkpointed, reentrant",
    "checkpointed",
    "dropout, checkpointed",
    "dropout, set back",
}
CHECKPOINT = ["never", "except_last", "always"]

# Layers that return their input or aliases of it, and layers that then change both in place.
ALIASES = [
    "identity",
    "linear",
    "tied",
    "shared",
    "twice",
    "and a view",
    "and its input",
    "swap",
    "relu in place",
    "add in place",
]
# What asks how things are, and what it may find.
ASK = [
    "as things are",
    "as weights",
    "as things are",
    "and a name",
    "by name",
    "and detached",
    "detached",
]

# Not drawn for ranks: modules shared by two partitions (refused); unregistered parameters (unknown to other ranks);
# parameters that a forward changes (not sent to other ranks); and what works with backward() only, because `Everywhere`
# runs each rank's part by autograd.grad.
NOT_FOR_RANKS = {
    "tied",
    "shared",
    "shared norm",
    "borrowed",
    "embedding, rescaled",
    "parameter in place",
    "checkpointed, reentrant",
}

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
    """A skip from layer `source` to layer `target`: what is stashed, and how the target uses it."""

    source: int
    target: int
    stash: str
    pop: str


@dataclass(frozen=True)
class Step:
    """A step: how forward and backward run, what follows, the modes, and every how many parameters are frozen."""

    run: str = "backward"
    after: str = "update"
    training: bool = True
    every: int = 1
    modes: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class Case:
    """A model (kinds of layers, skips), a kind of input, options of `GPipe`, and the steps to run."""

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
        """Build the layers, each time with the same parameters."""
        torch.manual_seed(self.seed)
        parts = shared_parts().double()
        several = self.input in ("with integers", "twice")
        layers: list[nn.Module] = []
        for k, kind in enumerate(self.kinds):
            layer = KINDS[kind](parts)
            if several and kind not in OF_SEVERAL:
                layer = OnFirst(layer)
            stashes = {
                f"skip {s}": STASHES[skip.stash]
                for s, skip in enumerate(self.skips)
                if skip.source == k
            }
            pops = {
                f"skip {s}": POPS[skip.pop] for s, skip in enumerate(self.skips) if skip.target == k
            }
            layers.append(with_skips(layer, stashes, pops) if stashes or pops else layer)
            both = any(
                s.target == k and s.pop == "return both" and s.stash != "nothing"
                for s in self.skips
            )
            several = both or kind in TO_SEVERAL or (several and not kind.startswith("sum"))
        return nn.Sequential(*layers).double()

    def leaf(self) -> Tensor:
        return torch.randn(self.batch, WIDTH, dtype=torch.float64).requires_grad_(
            self.input != "no gradient"
        )

    def options(self) -> dict[str, Any]:
        names = ["chunks", "engine", "checkpoint", "deferred_batch_norm"]
        names += ["portals", "dependency"] if self.engine != "ranks" else []
        return {name: getattr(self, name) for name in names}

    def has(self, *what: str) -> bool:
        """Whether the case has one of these kinds of layers or steps; "in place" means any of the in-place ones."""
        there = {*self.kinds, *(what for step in self.steps for what in (step.run, *step.modes))}
        if any("in place" in what for what in (*self.kinds, *(skip.pop for skip in self.skips))):
            there.add("in place")
        return not there.isdisjoint(what)

    @property
    def reorders(self) -> bool:
        """Whether sums of more than two terms may have another order: gradients of one tensor, or batch statistics."""
        forks = (
            sum(kind in FORKS for kind in self.kinds) + len(self.skips) + (self.input == "twice")
        )
        return forks > 1 or self.has(*USE_TWICE) or self.deferred_batch_norm


@st.composite
def cases(draw: Callable[..., Any], ranks: int | None = None) -> Case:
    """Draw a case for one process, or for so many ranks."""
    # Draw few in-place layers: PyTorch refuses many of their uses.
    apart = [kind for kind in KINDS if "in place" not in kind]
    fit = (lambda kind: True) if ranks is None else (lambda kind: kind not in NOT_FOR_RANKS)
    several = (apart, ALIASES, ASK, [*KINDS])
    kind = st.one_of(*(st.sampled_from([kind for kind in kinds if fit(kind)]) for kinds in several))
    kinds = draw(st.lists(kind, min_size=ranks or 1, max_size=7))
    n = len(kinds)
    count = {"max_size": 3} if ranks is None else {"min_size": ranks - 1, "max_size": ranks - 1}
    cuts = draw(st.sets(st.integers(1, n - 1), **count)) if n > 1 else set()
    pair = st.sampled_from([(a, b) for b in range(n) for a in range(b)] or [(0, 0)])
    skip = st.builds(
        lambda pair, *how: Skip(*pair, *how),
        pair,
        st.sampled_from([*STASHES]),
        st.sampled_from([*POPS]),
    )
    run = st.sampled_from(
        ["backward"] * 2 + [run for run, unfit in RUNS.items() if unfit.isdisjoint(kinds)]
    )
    mode = st.sampled_from([""] * 6 + [*AROUND] * WITHOUT_MODES.isdisjoint(kinds))
    how = (
        st.sampled_from(AFTER),
        st.sampled_from([True, True, False]),
        st.integers(1, 3),
        st.tuples(mode, mode),
    )
    step = st.builds(Step, run, *how)
    return Case(
        kinds=tuple(kinds),
        balance=tuple(b - a for a, b in pairwise([0, *sorted(cuts), n])),
        skips=tuple(draw(st.lists(skip, max_size=3))) if n > 1 else (),
        input=draw(st.sampled_from([*INPUTS])),
        batch=draw(st.integers(1, 9)),
        chunks=draw(st.integers(1, 5)),
        engine=draw(st.sampled_from(["graph", "workers"])) if ranks is None else "ranks",
        checkpoint=draw(st.sampled_from(CHECKPOINT)),
        # A bias before a norm by its input has no gradient but rounding, and deferred statistics are rounded otherwise.
        deferred_batch_norm=draw(st.booleans())
        and {"batch norm, no statistics", "own norm"}.isdisjoint(kinds),
        portals=not draw(st.booleans()),
        dependency=not draw(st.booleans()),
        observed=draw(st.booleans()),
        steps=tuple(draw(st.lists(step, min_size=3, max_size=3))),
        seed=draw(st.integers(0, 99)),
    )
