"""Skips reach their layer, and their gradients come back, whatever boundaries lie between."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe.skip import Namespace, pop, skippable, stash

from .compare import go_backward, transparent


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def skips(run: Callable[[nn.Module, Tensor], Any], *, stashes: str = "", pops: str = "") -> nn.Module:
    """Return a layer that has a linear one and calls a generator, which stashes and pops skips of one letter."""

    @skippable(stash=list(stashes), pop=list(pops))
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear()

        def forward(self, x: Tensor) -> Any:
            return (yield from run(self.linear, x))

    return Skips()


def stashing(function: Callable[[Tensor], Tensor | None] = torch.tanh) -> nn.Module:
    def run(linear: nn.Module, x: Tensor) -> Any:
        yield stash("a", function(x))
        return linear(x)

    return skips(run, stashes="a")


def popping() -> nn.Module:
    """Multiply by what was stashed, if anything was."""

    def run(linear: nn.Module, x: Tensor) -> Any:
        a = yield pop("a")
        return linear(x) if a is None else linear(x) * a

    return skips(run, pops="a")


def stash_two(_: nn.Module, x: Tensor) -> Any:
    yield stash("b", x.exp())
    yield stash("a", x.sin())
    return x


def pop_two(_: nn.Module, x: Tensor) -> Any:
    a = yield pop("a")
    b = yield pop("b")
    return x * a + b


def exchange(_: nn.Module, x: Tensor) -> Any:
    a = yield pop("a")
    yield stash("b", a * x)
    return x + a


def pop_b(_: nn.Module, x: Tensor) -> Any:
    b = yield pop("b")
    return x.sin() + b


def only_the_skip(linear: nn.Module, x: Tensor) -> Any:
    """Give the next layer nothing that takes a gradient."""
    yield stash("a", linear(x))
    return torch.ones_like(x, requires_grad=False)


def the_output(linear: nn.Module, x: Tensor) -> Any:
    y = linear(x)
    yield stash("a", y)
    return y


def two_skips() -> nn.Sequential:
    return nn.Sequential(skips(stash_two, stashes="ab"), nn.Sigmoid(), skips(pop_two, pops="ab"))


def chain() -> nn.Sequential:
    return nn.Sequential(stashing(), skips(exchange, stashes="b", pops="a"), skips(pop_b, pops="b"))


def paired(pattern: str, function: Callable[[Tensor], Tensor | None] = torch.tanh) -> nn.Sequential:
    """Lay out layers: `[` stashes, `]` pops the latest, `)` the earliest of those open, `-` is a linear layer."""
    open: list[Namespace] = []
    layers: list[Any] = []
    for symbol in pattern:
        if symbol == "[":
            open.append(Namespace())
            layers.append(stashing(function).isolate(open[-1]))  # type: ignore[operator]
        elif symbol in "])":
            layers.append(popping().isolate(open.pop(-1 if symbol == "]" else 0)))  # type: ignore[operator]
        else:
            layers.append(linear())
    return nn.Sequential(*layers)


# Layers, and layers per partition.
CASES: dict[str, tuple[Callable[[], nn.Sequential], list[int]]] = {
    "within": (lambda: paired("[-]---"), [3, 3]),
    "to the next": (lambda: paired("-[]-"), [2, 2]),
    "over one": (lambda: paired("[-]"), [1, 1, 1]),
    "from end to end": (lambda: paired("[--]"), [1, 1, 1, 1]),
    "nested": (lambda: paired("[[[-]]]"), [2, 3, 2]),
    "one after another": (lambda: paired("[][][]"), [1, 2, 2, 1]),
    "crossed": (lambda: paired("[[-))"), [1, 1, 1, 2]),
    "several over one boundary": (lambda: paired("[[[)])"), [3, 3]),
    "within and across": (lambda: paired("[[]-]"), [3, 2]),
    "two from one layer": (two_skips, [1, 1, 1]),
    "popped and stashed at once": (chain, [1, 1, 1]),
    "popped and stashed in one partition": (chain, [1, 2]),
    "only the skip takes a gradient": (
        lambda: nn.Sequential(skips(only_the_skip, stashes="a"), nn.Sigmoid(), popping()), [1, 1, 1]
    ),
    "none": (lambda: paired("[-]", lambda x: None), [1, 1, 1]),
    "none within": (lambda: paired("[]-", lambda x: None), [2, 1]),
    "detached": (lambda: paired("[-]", lambda x: x.detach().sin()), [1, 1, 1]),
    "integer": (lambda: paired("[-]", lambda x: x.argmax(1, keepdim=True)), [1, 1, 1]),
    "the input itself": (lambda: paired("[-]", lambda x: x), [1, 1, 1]),
    "a constant": (lambda: paired("[-]", lambda x: torch.full_like(x, 2, requires_grad=False)), [1, 1, 1]),
}  # fmt: skip


@pytest.mark.parametrize("portals", [True, False], ids=["portals", "through"])
@pytest.mark.parametrize("build, balance", CASES.values(), ids=CASES)
def test_skips(build: Callable[[], nn.Sequential], balance: list[int], portals: bool, way: dict[str, Any]) -> None:
    transparent(build(), torch.randn(7, 4).requires_grad_(), balance, portals=portals, **way)


@pytest.mark.parametrize("chunks", [1, 2, 9])
@pytest.mark.parametrize("grad", [True, False], ids=["input takes a gradient", "input takes none"])
def test_chunks(grad: bool, chunks: int, way: dict[str, Any]) -> None:
    transparent(paired("[-[-]-]"), torch.randn(7, 4).requires_grad_(grad), [1, 2, 2, 2], chunks=chunks, **way)


def test_none_for_some_micro_batches(way: dict[str, Any]) -> None:
    x = torch.tensor([1.0, -1, 1, -1, -1, 1, 1]).reshape(7, 1).repeat(1, 4).requires_grad_()
    module = paired("[-]", lambda x: x.sin() if x[0, 0] > 0 else None)
    transparent(module, x, [1, 1, 1], chunks=7, **way)


def test_every_boundary(way: dict[str, Any]) -> None:
    pattern = "[[-][])"
    for a, b in combinations(range(1, len(pattern)), 2):
        transparent(paired(pattern), torch.randn(5, 4).requires_grad_(), [a, b - a, len(pattern) - b], **way)


@pytest.mark.parametrize("grad", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("balance", [[4], [2, 2], [1, 3], [1, 1, 2]], ids=str)
def test_a_skip_that_is_the_output_changed_in_place(balance: list[int], grad: bool, way: dict[str, Any]) -> None:
    def check() -> None:
        module = nn.Sequential(skips(the_output, stashes="a"), nn.ReLU(inplace=True), linear(), popping())
        options = {"backward": go_backward} if grad else {"backward": None, "within": torch.no_grad}
        transparent(module, torch.randn(7, 4), balance, steps=3, **options, **way)

    one_graph = way["engine"] == "graph" and (way["checkpoint"] == "never" or not grad)
    if one_graph or balance in ([4], [2, 2]):  # without a boundary between the two layers, both change as one
        check()
    else:
        with pytest.raises(RuntimeError, match="changed an input in place that shares memory"):
            check()
