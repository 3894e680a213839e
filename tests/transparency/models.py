"""Generated models, and how each of them is run: `Case`, and `cases()`, which hypothesis draws them from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor, nn

from .layers import KINDS, OF_SEVERAL, POPS, STASHES, TO_SEVERAL, WIDTH, First, linear, with_skips

# Made of a leaf.
INPUTS: dict[str, Callable[[Tensor], Tensor | tuple[Tensor, ...]]] = {
    "no gradient": lambda x: x,
    "gradient": lambda x: x,
    "computed": lambda x: 2 * x,
    "with integers": lambda x: (x, torch.arange(len(x))),
    "twice": lambda x: (x, x),
}
RUNS = [
    "backward",
    "no grad",
    "inference",
    "no backward",
    "backward twice",
    "evaluation between",
    "autograd.grad",
    "inputs",
    "two forwards",
    "functional_call",
]
# Where PyTorch itself refuses plain layers, or recomputes with other weights, or does not put the weights back.
UNFIT = {
    "autograd.grad": {"checkpointed, reentrant"},
    "inputs": {"checkpointed, reentrant"},
    "functional_call": {"checkpointed", "checkpointed, reentrant", "shared"},
}
AFTER = ["update", "update, zero", "accumulate", "freeze", "reload"]
CHECKPOINT = ["never", "except_last", "always"]


@dataclass(frozen=True)
class Skip:
    """From layer `source` to layer `target`: what is stashed, and what comes of it."""

    source: int
    target: int
    stash: str
    pop: str


@dataclass(frozen=True)
class Step:
    """How forward and backward are run, in which mode, and what an optimizer does after them."""

    run: str = "backward"
    after: str = "update"
    training: bool = True


@dataclass(frozen=True)
class Case:
    """Kinds of layers, skips, a kind of input, options of `GPipe`, and steps."""

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
        torch.manual_seed(self.seed)
        shared = linear().double()
        several = self.input in ("with integers", "twice")
        layers: list[nn.Module] = []
        for k, kind in enumerate(self.kinds):
            layer = KINDS[kind](shared)
            if several and kind not in OF_SEVERAL:
                layer = First(layer)
            stashes = {f"skip {s}": skip.stash for s, skip in enumerate(self.skips) if skip.source == k}
            pops = {f"skip {s}": skip.pop for s, skip in enumerate(self.skips) if skip.target == k}
            layers.append(with_skips(layer, stashes, pops) if stashes or pops else layer)
            along = any(s.target == k and s.pop == "return both" and s.stash != "nothing" for s in self.skips)
            several = along or kind in TO_SEVERAL or (several and not kind.startswith("sum"))
        return nn.Sequential(*layers).double()

    def leaf(self) -> Tensor:
        return torch.randn(self.batch, WIDTH, dtype=torch.float64).requires_grad_(self.input != "no gradient")

    def value(self, leaf: Tensor) -> Tensor | tuple[Tensor, ...]:
        return INPUTS[self.input](leaf)

    def options(self) -> dict[str, Any]:
        names = ("chunks", "engine", "checkpoint", "deferred_batch_norm", "portals", "dependency")
        return {name: getattr(self, name) for name in names}

    @property
    def in_place(self) -> bool:
        """Whether tensors are changed that autograd may have saved."""
        return any("in place" in what for what in [*self.kinds, *(s.pop for s in self.skips)])

    @property
    def reorders(self) -> bool:
        """Whether numbers may be added in another order: gradients, where more than two meet, and statistics."""
        forks = TO_SEVERAL | {"squares", "half detached", "transformer", "swap"}
        meet = sum(kind in forks for kind in self.kinds) + len(self.skips) + (self.input == "twice")
        several = {
            "two names",
            "pruned",
            "spectral norm, by a hook",
            "tied",
            "shared",
            "borrowed",
            "lstm",
            "spectral norm",
            "embedding",
            "checkpointed, reentrant",
        }
        return (
            meet > 1
            or not several.isdisjoint(self.kinds)
            or self.deferred_batch_norm
            or "two forwards" in {s.run for s in self.steps}
        )


@st.composite
def cases(draw: Callable[..., Any]) -> Case:
    kinds = draw(
        st.lists(st.sampled_from([k for k in KINDS if "in place" not in k] + [*KINDS]), min_size=1, max_size=7)
    )
    # One takes no gradient for zeros.
    assume(not {"no gradient", "checkpointed, reentrant"} <= {*kinds})
    n = len(kinds)
    cuts = draw(st.sets(st.integers(1, n - 1), max_size=3)) if n > 1 else set()
    pairs = [(a, b) for b in range(n) for a in range(b)]
    skip = st.builds(
        lambda pair, stash, pop: Skip(*pair, stash, pop),
        st.sampled_from(pairs or [(0, 0)]),
        st.sampled_from([*STASHES]),
        st.sampled_from([*POPS]),
    )
    runs = [run for run in RUNS if UNFIT.get(run, set()).isdisjoint(kinds)]
    step = st.builds(Step, st.sampled_from(runs), st.sampled_from(AFTER), st.sampled_from([True, False]))
    return Case(
        kinds=tuple(kinds),
        balance=tuple(b - a for a, b in pairwise([0, *sorted(cuts), n])),
        skips=tuple(draw(st.lists(skip, max_size=3))) if pairs else (),
        input=draw(st.sampled_from([*INPUTS])),
        batch=draw(st.integers(1, 9)),
        chunks=draw(st.integers(1, 5)),
        engine=draw(st.sampled_from(["graph", "workers"])),
        checkpoint=draw(st.sampled_from(CHECKPOINT)),
        deferred_batch_norm=draw(st.booleans()),
        portals=not draw(st.booleans()),
        dependency=not draw(st.booleans()),
        observed=draw(st.booleans()),
        steps=tuple(draw(st.lists(step, min_size=3, max_size=3))),
        seed=draw(st.integers(0, 99)),
    )
