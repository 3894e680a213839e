"""Test cases with skip connections within a partition and between partitions."""

from collections.abc import Callable
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.skip import Namespace

from ...parts.layers import linear, only_a_skip, real
from ...parts.wiring import nothing, the_input, the_output, with_skips
from ...row import Row, but_graph_never, steps
from ..between.modes import within

Stashed = Callable[[Tensor, Tensor], Tensor | None]

PATTERN = "[[-][])"
WHOLE = {"ranks": "skips go straight from rank to rank"}
SHARES = "changed an input in place, but a skip or another input shares its memory"
# In one partition, both layers see the change. A single autograd graph sees all changes.
APART = but_graph_never(SHARES)
ONCE_IS_ENOUGH = {
    "one partition": "once is enough",
    "one micro-batch": "likewise",
    "observed": "likewise",
}


# Functions of a layer's input `x` and output `y` that return what the layer stashes.


def of_input(x: Tensor, _: Tensor) -> Tensor:
    return x.tanh()


def none_for_some(x: Tensor, _: Tensor) -> Tensor | None:
    return x.sin() if x[0, 0] > 0 else None


def detached(x: Tensor, _: Tensor) -> Tensor:
    return x.detach().sin()


def integer(x: Tensor, _: Tensor) -> Tensor:
    return x.argmax(1, keepdim=True)


def constant(x: Tensor, _: Tensor) -> Tensor:
    return torch.full_like(x, 2, requires_grad=False)


# Layers.


def stashing(names: str = "a", stashed: Stashed = of_input, *, pops: str = "") -> Any:
    """Return a linear layer that also stashes (stores) and pops (takes) skips.

    Args:
        names: The names of the skips to stash, one letter each.
        stashed: A function of the layer's input and output that returns the tensor to stash.
        pops: The names of the skips to pop, one letter each.
    """
    return with_skips(linear(), dict.fromkeys(names, stashed), dict.fromkeys(pops, torch.mul))


def popping(names: str = "a") -> Any:
    return stashing("", pops=names)


def paired(pattern: str, stashed: Stashed = of_input) -> nn.Sequential:
    """Build a model with one layer for each symbol of `pattern`.

    - `[` stashes (stores) a skip.
    - `]` pops (takes) the latest skip that no layer has popped.
    - `)` pops the earliest such skip.
    - `-` is a linear layer.
    """
    open: list[Namespace] = []
    layers: list[Any] = []
    for symbol in pattern:
        if symbol == "[":
            namespace = Namespace()
            open.append(namespace)
            layers.append(stashing("a", stashed).isolate(namespace))
        elif symbol == "-":
            layers.append(linear())
        else:
            namespace = open.pop(-1 if symbol == "]" else 0)
            layers.append(popping().isolate(namespace))
    return nn.Sequential(*layers)


def two_from_one() -> nn.Sequential:
    return nn.Sequential(stashing("ab"), nn.Sigmoid(), popping("ba"))


def popped_and_stashed() -> nn.Sequential:
    return nn.Sequential(stashing(), stashing("b", pops="a"), popping("b"))


def output_changed(*between: nn.Module) -> nn.Sequential:
    """Build a model in which a layer's output is stashed as a skip, and then changed in place.

    Args:
        between: Layers between the stash and the change.
    """
    stashes = stashing("a", the_output)
    return nn.Sequential(stashes, *between, nn.ReLU(inplace=True), linear(), popping())


def output_handed_on() -> nn.Sequential:
    return output_changed(nn.Identity())


# How the layers are built, and the number of layers in each partition.
THREE = (1, 1, 1)
CASES: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...]]] = {
    "from end to end": (partial(paired, "[--]"), (1, 1, 1, 1)),
    "two from one layer": (two_from_one, THREE),
    "popped and stashed at once": (popped_and_stashed, THREE),
    "only the skip takes a gradient": (only_a_skip, (2, 1)),
    "none": (partial(paired, "[-]", nothing), THREE),
    "none within": (partial(paired, "[]-", nothing), (2, 1)),
    "none for some micro-batches": (partial(paired, "[-]", none_for_some), THREE),
    "detached": (partial(paired, "[-]", detached), THREE),
    "integer": (partial(paired, "[-]", integer), THREE),
    "the input itself": (partial(paired, "[-]", the_input), THREE),
    "a constant": (partial(paired, "[-]", constant), THREE),
}

ROWS: list[Row] = []
for what, (build, balance) in CASES.items():
    without_grad = partial(real, grad=False)
    through = {"portals": False}
    ROWS.append(Row(what, build, real, balance))
    ROWS.append(Row(f"{what}, input takes none", build, without_grad, balance))
    ROWS.append(Row(f"{what}, through", build, real, balance, options=through, without=WHOLE))
for a, b in combinations(range(1, 7), 2):
    for how, options, without in (
        ("", {}, ONCE_IS_ENOUGH),
        (", through", {"portals": False}, ONCE_IS_ENOUGH | WHOLE),
    ):
        row = Row(
            f"{PATTERN} at {a} and {b}{how}",
            partial(paired, PATTERN),
            balance=(a, b - a, 7 - b),
            options=options,
            without=without,
        )
        ROWS.append(row)
for balance, refused in (((2, 2), {}), ((1, 3), APART), ((1, 1, 2), APART)):
    row = Row(
        f"a skip that is the output changed in place, {balance}",
        output_changed,
        balance=balance,
        use=steps,
        refused=refused,
    )
    ROWS.append(row)
ROWS += [
    # The middle partition passes on a tensor that shares memory with the skip.
    Row(
        "a skip that is the output, handed on and changed in place",
        output_handed_on,
        balance=(1, 1, 3),
        use=steps,
        refused=APART,
    ),
    Row(
        "likewise without a gradient",
        output_changed,
        balance=(1, 3),
        use=within(torch.no_grad),
        refused={"workers": SHARES, "ranks": SHARES},
    ),
]
