"""`cases`, the hypothesis strategy that draws test models and the steps to run with them."""

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from .kinds import KINDS
from .models import AROUND, INPUTS, Case, Skip, Step
from .wiring import POPS, STASHES

REENTRANT = "checkpointed, reentrant"
RUNS: dict[str, set[str]] = {
    "backward": set(),
    "no grad": set(),
    "inference": set(),
    "no backward": set(),
    "backward twice": set(),
    "evaluation between": set(),
    "changed between": {REENTRANT, "checkpointed", "borrowed"},
    "frozen between": {REENTRANT, "checkpointed", "borrowed"},
    "two forwards": set(),
    "autograd.grad": {REENTRANT, "borrowed"},
    "inputs": {REENTRANT, "borrowed"},
    "functional_call": {
        REENTRANT,
        "checkpointed",
        "shared",
        "shared norm",
        "borrowed",
        "as weights",
    },
}
"""The ways to run a step, and for each way the kinds of layers that are not drawn together with it.

With these layers, PyTorch itself raises an error, computes something wrong or warns. Or the layers
have an unregistered parameter, which `autograd.grad` does not find.
"""

AFTER = ["update", "update, zero", "accumulate", "freeze", "reload"]

WITHOUT_MODES = {
    REENTRANT,
    "checkpointed",
    "dropout, checkpointed",
    "dropout, set back",
}
"""Kinds of layers that are not drawn with modes: PyTorch recomputes these layers without modes."""

CHECKPOINT = ["never", "except_last", "always"]

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
"""Kinds of layers that return their input or a view of it, or change their input in place."""

ASK = [
    "as things are",
    "as weights",
    "as things are",
    "and a name",
    "by name",
    "and detached",
    "detached",
]
"""Kinds of layers that read or change attributes, types and flags of tensors."""

NOT_FOR_RANKS = {
    "tied",
    "shared",
    "shared norm",
    "borrowed",
    "embedding, rescaled",
    "parameter in place",
    REENTRANT,
}
"""Kinds of layers that are not drawn for pipelines over ranks.

Partitions on two ranks cannot share a module. Other ranks do not know unregistered parameters,
nor parameters that a forward changes. `Everywhere` runs each rank's backward by `autograd.grad`,
so that layers must not depend on `backward()`.
"""


def _lists_of_kinds(ranks: int | None) -> Any:
    """Return a hypothesis strategy that draws a list of kinds, one for each layer of a model."""
    # Draw few in-place layers, because PyTorch raises errors for many uses of such layers.
    apart = [kind for kind in KINDS if "in place" not in kind]
    strategies = []
    for kinds in (apart, ALIASES, ASK, [*KINDS]):
        if ranks is not None:
            kinds = [kind for kind in kinds if kind not in NOT_FOR_RANKS]
        strategies.append(st.sampled_from(kinds))
    return st.lists(st.one_of(*strategies), min_size=ranks or 1, max_size=7)


def _skips(n: int) -> Any:
    """Return a hypothesis strategy that draws skip connections for a model with `n` layers."""
    pairs: list[tuple[int, int]] = []
    for target in range(n):
        for source in range(target):
            pair = (source, target)
            pairs.append(pair)

    def skip(pair: tuple[int, int], stash: str, pop: str) -> Skip:
        source, target = pair
        return Skip(source, target, stash, pop)

    stash, pop = st.sampled_from([*STASHES]), st.sampled_from([*POPS])
    one = st.builds(skip, st.sampled_from(pairs), stash, pop)
    return st.lists(one, max_size=3)


def _steps(kinds: list[str]) -> Any:
    """Return a hypothesis strategy that draws three training steps for a model.

    Some ways to run a step do not work with some kinds of layers, and are not drawn with them.
    """
    runs = ["backward", "backward"]
    runs += [run for run, unfit in RUNS.items() if unfit.isdisjoint(kinds)]
    modes = [""] * 6
    if WITHOUT_MODES.isdisjoint(kinds):
        modes += [*AROUND]
    mode = st.sampled_from(modes)
    training, every = st.sampled_from([True, True, False]), st.integers(1, 3)
    step = st.builds(
        Step, st.sampled_from(runs), st.sampled_from(AFTER), training, every, st.tuples(mode, mode)
    )
    return st.lists(step, min_size=3, max_size=3)


@st.composite
def cases(draw: Callable[..., Any], ranks: int | None = None) -> Case:
    """Draw a random test case.

    Args:
        draw: The function with which hypothesis draws values.
        ranks: The number of ranks of the pipeline, or `None` for a pipeline in one process.
    """
    kinds = draw(_lists_of_kinds(ranks))
    n = len(kinds)
    cuts: set[int] = set()
    if n > 1:
        least, most = (0, 3) if ranks is None else (ranks - 1, ranks - 1)
        cuts = draw(st.sets(st.integers(1, n - 1), min_size=least, max_size=most))
    balance: list[int] = []
    start = 0
    for end in (*sorted(cuts), n):
        balance.append(end - start)
        start = end
    skips = draw(_skips(n)) if n > 1 else []
    input = draw(st.sampled_from([*INPUTS]))
    batch, chunks = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    engine = draw(st.sampled_from(["graph", "workers"])) if ranks is None else "ranks"
    checkpoint = draw(st.sampled_from(CHECKPOINT))
    deferred = draw(st.booleans())
    # The two norms named below subtract the mean of their input. So the bias of a layer right
    # before them has no effect, and its gradient is only a rounding error. Deferred batch norm
    # would change this rounding error.
    if not {"batch norm, no statistics", "own norm"}.isdisjoint(kinds):
        deferred = False
    return Case(
        kinds=tuple(kinds),
        balance=tuple(balance),
        skips=tuple(skips),
        input=input,
        batch=batch,
        chunks=chunks,
        engine=engine,
        checkpoint=checkpoint,
        deferred_batch_norm=deferred,
        portals=not draw(st.booleans()),
        dependency=not draw(st.booleans()),
        observed=draw(st.booleans()),
        steps=tuple(draw(_steps(kinds))),
        seed=draw(st.integers(0, 99)),
    )
