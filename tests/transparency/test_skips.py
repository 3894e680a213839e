"""Skips reach their layer, and their gradients come back, whatever boundaries lie between."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe.skip import Namespace

from .compare import assert_transparent
from .layers import linear, only_a_skip
from .wiring import with_skips

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


# Layers, and layers per partition.
CASES: dict[str, tuple[Callable[[], nn.Sequential], list[int]]] = {
    "from end to end": (lambda: paired("[--]"), [1, 1, 1, 1]),
    "two from one layer": (lambda: nn.Sequential(stashing("ab"), nn.Sigmoid(), popping("ba")), [1, 1, 1]),
    "popped and stashed at once": (lambda: nn.Sequential(stashing(), stashing("b", pops="a"), popping("b")), [1, 1, 1]),
    "only the skip takes a gradient": (only_a_skip, [2, 1]),
    "none": (lambda: paired("[-]", lambda x, y: None), [1, 1, 1]),
    "none within": (lambda: paired("[]-", lambda x, y: None), [2, 1]),
    "none for some micro-batches": (lambda: paired("[-]", lambda x, y: x.sin() if x[0, 0] > 0 else None), [1, 1, 1]),
    "detached": (lambda: paired("[-]", lambda x, y: x.detach().sin()), [1, 1, 1]),
    "integer": (lambda: paired("[-]", lambda x, y: x.argmax(1, keepdim=True)), [1, 1, 1]),
    "the input itself": (lambda: paired("[-]", lambda x, y: x), [1, 1, 1]),
    "a constant": (lambda: paired("[-]", lambda x, y: torch.full_like(x, 2, requires_grad=False)), [1, 1, 1]),
}
portals = pytest.mark.parametrize("portals", [True, False], ids=["portals", "through"])


@portals
@pytest.mark.parametrize("chunks", [1, 3, 9])
@pytest.mark.parametrize("grad", [True, False], ids=["input takes a gradient", "input takes none"])
@pytest.mark.parametrize("build, balance", CASES.values(), ids=CASES)
def test_skips(build: Any, balance: list[int], grad: bool, chunks: int, portals: bool, way: dict[str, Any]) -> None:
    x = torch.randn(7, 4).requires_grad_(grad)
    assert_transparent(build(), x, balance, chunks=chunks, portals=portals, **way)


@portals
def test_every_boundary(portals: bool, way: dict[str, Any]) -> None:
    pattern = "[[-][])"
    for a, b in combinations(range(1, len(pattern)), 2):
        balance = [a, b - a, len(pattern) - b]
        assert_transparent(paired(pattern), torch.randn(5, 4).requires_grad_(), balance, portals=portals, **way)


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad])
@pytest.mark.parametrize("balance", [[4], [2, 2], [1, 3], [1, 1, 2]], ids=str)
def test_a_skip_that_is_the_output_changed_in_place(balance: list[int], mode: Any, way: dict[str, Any]) -> None:
    def check() -> None:
        module = nn.Sequential(stashing("a", lambda x, y: y), nn.ReLU(inplace=True), linear(), popping())
        assert_transparent(module, torch.randn(7, 4), balance, steps=3, within=mode, **way)

    one_graph = way["engine"] == "graph" and (way["checkpoint"] == "never" or mode is torch.no_grad)
    if one_graph or balance in ([4], [2, 2]):  # without a boundary between the two layers, both change as one
        check()
    else:
        with pytest.raises(RuntimeError, match="changed an input in place that shares memory"):
            check()
