"""Skips reach their layer, and their gradients come back, whatever boundaries lie between."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.skip import Namespace

from ..parts.layers import linear, only_a_skip, real
from ..parts.wiring import with_skips
from ..row import Row, steps

Stashed = Callable[[Tensor, Tensor], Tensor | None]


def of_input(x: Tensor, _: Tensor) -> Tensor:
    return x.tanh()


def stashing(names: str = "a", stashed: Stashed = of_input, *, pops: str = "") -> Any:
    """Return a linear layer that stashes and pops skips of one letter."""
    return with_skips(linear(), dict.fromkeys(names, stashed), dict.fromkeys(pops, torch.mul))


def popping(names: str = "a") -> Any:
    return stashing("", pops=names)


def paired(pattern: str, stashed: Stashed = of_input) -> nn.Sequential:
    """Lay out layers: `[` stashes, `]` pops the latest, `)` the earliest of those open, `-` is a linear layer."""
    open: list[Namespace] = []
    layers: list[Any] = []
    for symbol in pattern:
        if symbol == "[":
            open.append(Namespace())
            layers.append(stashing("a", stashed).isolate(open[-1]))
        elif symbol in "])":
            layers.append(popping().isolate(open.pop(-1 if symbol == "]" else 0)))
        else:
            layers.append(linear())
    return nn.Sequential(*layers)


def output_changed() -> nn.Sequential:
    return nn.Sequential(stashing("a", lambda x, y: y), nn.ReLU(inplace=True), linear(), popping())


def output_handed_on() -> nn.Sequential:
    """The partition between hands on what shares memory with a skip."""
    return nn.Sequential(stashing("a", lambda x, y: y), nn.Identity(), nn.ReLU(inplace=True), linear(), popping())


def without_grad(run: nn.Module, x: Tensor) -> Any:
    with torch.no_grad():
        return [run(x) for _ in range(3)]


# Layers, and layers per partition.
CASES: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...]]] = {
    "from end to end": (lambda: paired("[--]"), (1, 1, 1, 1)),
    "two from one layer": (lambda: nn.Sequential(stashing("ab"), nn.Sigmoid(), popping("ba")), (1, 1, 1)),
    "popped and stashed at once": (lambda: nn.Sequential(stashing(), stashing("b", pops="a"), popping("b")), (1, 1, 1)),
    "only the skip takes a gradient": (only_a_skip, (2, 1)),
    "none": (lambda: paired("[-]", lambda x, y: None), (1, 1, 1)),
    "none within": (lambda: paired("[]-", lambda x, y: None), (2, 1)),
    "none for some micro-batches": (lambda: paired("[-]", lambda x, y: x.sin() if x[0, 0] > 0 else None), (1, 1, 1)),
    "detached": (lambda: paired("[-]", lambda x, y: x.detach().sin()), (1, 1, 1)),
    "integer": (lambda: paired("[-]", lambda x, y: x.argmax(1, keepdim=True)), (1, 1, 1)),
    "the input itself": (lambda: paired("[-]", lambda x, y: x), (1, 1, 1)),
    "a constant": (lambda: paired("[-]", lambda x, y: torch.full_like(x, 2, requires_grad=False)), (1, 1, 1)),
}
PATTERN = "[[-][])"
WHOLE = {"ranks": "skips go straight from rank to rank"}
SHARES = "changed an input in place that shares memory"
# Without a boundary between the two layers, both change as one; and one graph sees what each changes.
APART = {"always": SHARES, "except_last": SHARES, "workers": SHARES, "ranks": SHARES, "graph never": ""}

ROWS = [
    *(Row(what, build, balance=balance) for what, (build, balance) in CASES.items()),
    *(Row(f"{what}, input takes none", build, partial(real, grad=False), balance)
      for what, (build, balance) in CASES.items()),
    *(Row(f"{what}, through", build, balance=balance, options={"portals": False}, without=WHOLE)
      for what, (build, balance) in CASES.items()),
    *(Row(f"{PATTERN} at {a} and {b}{how}", partial(paired, PATTERN), balance=(a, b - a, 7 - b), options=options,
          without={"one partition": "once is enough", "one micro-batch": "likewise", "observed": "likewise", **more})
      for a, b in combinations(range(1, 7), 2)
      for how, options, more in (("", {}, {}), (", through", {"portals": False}, WHOLE))),
    Row("a skip that is the output changed in place", output_changed, balance=(2, 2), use=steps),
    *(Row(f"a skip that is the output changed in place, {balance}", output_changed, balance=balance, use=steps,
          refused=APART) for balance in ((1, 3), (1, 1, 2))),
    Row("a skip that is the output, handed on and changed in place", output_handed_on, balance=(1, 1, 3), use=steps,
        refused=APART),
    Row("likewise without a gradient", output_changed, balance=(1, 3), use=without_grad,
        refused={"workers": SHARES, "ranks": SHARES}),
]  # fmt: skip
