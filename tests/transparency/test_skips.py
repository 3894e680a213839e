"""Skips reach their layer, and their gradients come back, whatever boundaries lie between."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe.skip import Namespace, pop, skippable, stash


@skippable(stash=["skip"])
class Stash(nn.Module):
    """Stash a function of the input, on the way of a linear layer."""

    def __init__(self, function: Callable[[Tensor], Tensor | None] = torch.tanh) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        yield stash("skip", self.function(x))
        return self.linear(x)


@skippable(pop=["skip"])
class Pop(nn.Module):
    """Multiply by what was stashed, if anything was."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        skip = yield pop("skip")
        y = self.linear(x)
        return y if skip is None else y * skip


@skippable(stash=["a", "b"])
class StashTwo(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("b", x.exp())
        yield stash("a", x.sin())
        return x


@skippable(pop=["a", "b"])
class PopTwo(nn.Module):
    def forward(self, x: Tensor) -> Any:
        a = yield pop("a")
        b = yield pop("b")
        return x * a + b


@skippable(stash=["b"], pop=["a"])
class Exchange(nn.Module):
    def forward(self, x: Tensor) -> Any:
        a = yield pop("a")
        yield stash("b", a * x)
        return x + a


@skippable(stash=["a"])
class StashA(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("a", x)
        return x * 2


@skippable(pop=["b"])
class PopB(nn.Module):
    def forward(self, x: Tensor) -> Any:
        b = yield pop("b")
        return x.sin() + b


@skippable(stash=["a"])
class OnlyTheSkip(nn.Module):
    """Give the next layer nothing that takes a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        yield stash("a", self.linear(x))
        return torch.ones_like(x, requires_grad=False)


@skippable(pop=["a"])
class PopA(nn.Module):
    def forward(self, x: Tensor) -> Any:
        a = yield pop("a")
        return x * a


def paired(pattern: str, function: Callable[[Tensor], Tensor | None] = torch.tanh) -> nn.Sequential:
    """Lay out layers: `[` stashes, `]` pops the latest, `)` the earliest of those open, `-` is a linear layer."""
    open: list[Namespace] = []
    layers: list[nn.Module] = []
    for symbol in pattern:
        if symbol == "[":
            open.append(Namespace())
            layers.append(Stash(function).isolate(open[-1]))  # type: ignore[operator]
        elif symbol in "])":
            layers.append(Pop().isolate(open.pop(-1 if symbol == "]" else 0)))  # type: ignore[operator]
        else:
            layers.append(nn.Linear(4, 4))
    return nn.Sequential(*layers)


def named(*layers: type[nn.Module]) -> Callable[[], nn.Sequential]:
    return lambda: nn.Sequential(*(layer() for layer in layers))


# Layers, and layers per partition.
CASES: dict[str, tuple[Callable[[], nn.Sequential], list[int]]] = {
    "within": (lambda: paired("[-]---"), [3, 3]),
    "to the next": (lambda: paired("-[]-"), [2, 2]),
    "over one": (lambda: paired("[-]"), [1, 1, 1]),
    "from end to end": (lambda: paired("[--]"), [1, 1, 1, 1]),
    "nested": (lambda: paired("[[[-]]]"), [2, 3, 2]),
    "nested, far apart": (lambda: paired("[[--]]"), [2, 1, 1, 2]),
    "one after another": (lambda: paired("[][][]"), [1, 2, 2, 1]),
    "crossed": (lambda: paired("[[-))"), [1, 1, 1, 2]),
    "several over one boundary": (lambda: paired("[[[)])"), [3, 3]),
    "within and across": (lambda: paired("[[]-]"), [3, 2]),
    "two from one layer": (named(StashTwo, nn.Sigmoid, PopTwo), [1, 1, 1]),
    "popped and stashed at once": (named(StashA, Exchange, PopB), [1, 1, 1]),
    "popped and stashed in one partition": (named(StashA, Exchange, PopB), [1, 2]),
    "only the skip takes a gradient": (named(OnlyTheSkip, nn.Sigmoid, PopA), [1, 1, 1]),
    "none": (lambda: paired("[-]", lambda x: None), [1, 1, 1]),
    "none within": (lambda: paired("[]-", lambda x: None), [2, 1]),
    "detached": (lambda: paired("[-]", lambda x: x.detach().sin()), [1, 1, 1]),
    "integer": (lambda: paired("[-]", lambda x: x.argmax(1, keepdim=True)), [1, 1, 1]),
    "the input itself": (lambda: paired("[-]", lambda x: x), [1, 1, 1]),
    "a constant": (lambda: paired("[-]", lambda x: torch.full_like(x, 2, requires_grad=False)), [1, 1, 1]),
}


@pytest.mark.parametrize("portals", [True, False], ids=["portals", "through"])
@pytest.mark.parametrize("build, balance", CASES.values(), ids=CASES)
def test_skips(
    build: Callable[[], nn.Sequential],
    balance: list[int],
    portals: bool,
    way: dict[str, Any],
    equals_plain: Callable[..., Any],
) -> None:
    equals_plain(build, torch.randn(7, 4).requires_grad_(), balance, portals=portals, **way)


@pytest.mark.parametrize("chunks", [1, 2, 9])
@pytest.mark.parametrize("grad", [True, False], ids=["input takes a gradient", "input takes none"])
def test_chunks(grad: bool, chunks: int, way: dict[str, Any], equals_plain: Callable[..., Any]) -> None:
    x = torch.randn(7, 4).requires_grad_(grad)
    equals_plain(lambda: paired("[-[-]-]"), x, [1, 2, 2, 2], chunks=chunks, **way)


def test_none_for_some_micro_batches(way: dict[str, Any], equals_plain: Callable[..., Any]) -> None:
    def function(x: Tensor) -> Tensor | None:
        return x.sin() if x[0, 0] > 0 else None

    x = torch.tensor([1.0, -1, 1, -1, -1, 1, 1]).reshape(7, 1).repeat(1, 4).requires_grad_()
    equals_plain(lambda: paired("[-]", function), x, [1, 1, 1], chunks=7, **way)


def test_every_boundary(way: dict[str, Any], equals_plain: Callable[..., Any]) -> None:
    pattern = "[[-][])"
    x = torch.randn(5, 4).requires_grad_()
    for a, b in combinations(range(1, len(pattern)), 2):
        equals_plain(lambda: paired(pattern), x, [a, b - a, len(pattern) - b], **way)


@skippable(stash=["skip"])
class StashOutput(nn.Module):
    """Stash what is returned, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        yield stash("skip", y)
        return y


@pytest.mark.parametrize("grad", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("balance", [[4], [2, 2], [1, 3], [1, 1, 2]], ids=str)
def test_a_skip_that_is_the_output_changed_in_place(
    balance: list[int], grad: bool, way: dict[str, Any], equals_plain: Callable[..., Any]
) -> None:
    def build() -> nn.Sequential:
        return nn.Sequential(StashOutput(), nn.ReLU(inplace=True), nn.Linear(4, 4), Pop())

    options = {} if grad else {"backward": None, "within": torch.no_grad}
    one_graph = way["engine"] == "graph" and (way["checkpoint"] == "never" or not grad)
    if one_graph or balance in ([4], [2, 2]):  # without a boundary between the two layers, both change as one
        equals_plain(build, torch.randn(7, 4), balance, steps=3, **options, **way)
    else:
        with pytest.raises(RuntimeError, match="changed an input in place that shares memory"):
            equals_plain(build, torch.randn(7, 4), balance, **options, **way)
