"""Test the caches by which a count runs equal layers and equal operators only once."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import GELU, Dropout, Identity, LayerNorm, Linear, Module, Parameter, ReLU, Sequential

from benchmarks.gates.tally import tallied
from reproduce.models.built import amoebanetd, resnet101, unet
from torchgpipe import sequential
from torchgpipe.plan.count.count import count
from torchgpipe.plan.count.known import Alike, Remembered
from torchgpipe.plan.count.optimizer import Optimizer
from torchgpipe.plan.predict.memory import setup_memory
from torchgpipe.plan.predict.setup import Setup
from torchgpipe.skip.skippable import skips_of
from torchgpipe.trace.parts import tensors_in

from .test_counter import meta

X = torch.empty(4, 6)


class Pair(Module):
    """A module with two parameters. The test chooses whether they share a storage.

    Args:
        cut: A function that takes two random tensors, and returns the tensors of both parameters.
            These can be, for example, two views of one random tensor.
    """

    def __init__(self, cut: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        a, b = cut(torch.rand(12), torch.rand(12))
        self.a = Parameter(a)
        self.b = Parameter(b)


# Each of these layers behaves differently from all others.
LAYERS: list[Callable[[], Module]] = [
    lambda: Linear(6, 6),
    lambda: Linear(6, 7),
    lambda: Linear(6, 6, dtype=torch.float64),
    lambda: Linear(6, 6).requires_grad_(False),
    lambda: Linear(6, 6).eval(),
    lambda: Dropout(0.1),
    lambda: Dropout(0.2),
    lambda: Pair(lambda a, b: (a[:6], b[:6])),
    lambda: Pair(lambda a, b: (a[:6], a[:6])),
    lambda: Pair(lambda a, b: (a[:6], a[6:])),
]
# A layer behaves differently for each of these inputs.
VALUES: list[Any] = [
    X,
    (X,),
    (X, X),
    (X, X.clone()),
    torch.empty(5, 6),
    torch.empty(6, 4).t(),
    X.double(),
    torch.empty(4, 6, requires_grad=True),
    torch.empty(8, 6)[:4],
    torch.empty(8, 6)[4:],
]


def test_alike_whatever_tensors_contain() -> None:
    on_empty = []
    on_ones = []
    ones = torch.ones(4, 6)
    for build in LAYERS:
        on_empty.append(Alike().behaviour(build(), X))
        on_ones.append(Alike().behaviour(build(), ones))
    assert on_empty == on_ones
    assert None not in on_empty
    assert len({*on_empty}) == len(LAYERS)

    layer = Linear(6, 6)
    of_values = [Alike().behaviour(layer, x) for x in VALUES]
    of_values.append(Alike().behaviour(layer, X, "first"))
    assert len({*of_values}) == len(VALUES) + 1


def test_unknown_for_skips_and_what_cannot_be_pickled() -> None:
    not_pickled = Linear(6, 6)
    not_pickled.made_here = lambda: None  # type: ignore[assignment]
    with_skips = [layer for layer in unet(2, 1, 4) if any(skips_of(layer))]
    assert len(with_skips) > 0
    for layer in (not_pickled, *with_skips):
        assert Alike().behaviour(layer, X) is None


class Copied(Linear):
    copies = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Copied:
        Copied.copies += 1
        return Copied(self.in_features, self.out_features, device=self.weight.device)


@pytest.mark.parametrize(("widths", "different"), [([8] * 41, 1), ([8, 4] * 20 + [8], 2)])
def test_layers_that_behave_alike_are_copied_once(
    widths: list[int], different: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Copied, "copies", 0)
    layers = [Copied(a, b) for a, b in pairwise(widths)]
    counts = count(Sequential(*layers), torch.empty(1, 8))
    assert len(counts) == 40
    # The count copies a layer to run it: once for each of two batch sizes, and again for the count
    # of bytes. Of equal layers, it copies only one. The first layer never counts as equal to
    # another layer, and neither does the last layer in the count of bytes.
    assert Copied.copies == 2 * (2 * different + 3)


class Block(Module):
    """A residual block of three layers. Tracing makes a skip of its residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Copied(8, 8)
        self.second = Copied(8, 8)
        self.third = Copied(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.third(self.second(self.first(x)).relu())


def blocks(number: int = 3) -> Sequential:
    with torch.device("meta"):
        return sequential(Sequential(*[Block() for _ in range(number)]), meta(2, 8))


def test_traced_layers_that_differ_only_in_names_are_copied_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies = []
    for number in (4, 9):
        module = blocks(number)
        assert any(any(skips_of(layer)) for layer in module)
        monkeypatch.setattr(Copied, "copies", 0)
        count(module, meta(2, 8))
        copies.append(Copied.copies)
    assert copies[0] == copies[1] > 0


@pytest.mark.parametrize(
    ("works", "operator", "runs"),
    [
        ([lambda: meta(2, 3) + meta(3)] * 2, "add", 1),
        ([lambda: meta(2, 3).add_(meta(3))] * 2, "add_", 2),
        ([lambda: meta(2, 3).view(6)] * 2, "view", 2),
        ([lambda: torch.max(meta(2, 3), 1)] * 2, "max", 1),
        ([lambda: torch.cat([meta(2, 3), meta(1, 3)])] * 2, "cat", 1),
        ([lambda: torch.ones(3) + 1] * 2, "add", 2),  # not on meta, so it is not cached
        ([lambda: meta(2, 3) + 1, lambda: meta(2, 1) + 1], "add", 2),
        ([lambda: meta(2, 3) + 1, lambda: meta(2, 3).t() + 1], "add", 2),
        ([lambda: meta(2, 3) + 1, lambda: meta(2, 3) + 1.5], "add", 2),
    ],
)
def test_operators_run_once(works: list[Callable[[], object]], operator: str, runs: int) -> None:
    found: list[Tensor] = []
    plain: list[Tensor] = []
    with tallied() as tally, Remembered():
        for work in works:
            found += tensors_in(work())
    for work in works:
        plain += tensors_in(work())

    ran = [name.split(".")[1] for name in tally.operators]
    assert ran.count(operator) == runs
    for x, expected in zip(found, plain, strict=True):
        assert x.shape == expected.shape
        assert x.stride() == expected.stride()
        assert x.dtype == expected.dtype
        assert x.device == expected.device
    storages = {x.untyped_storage()._cdata for x in found}
    assert len(storages) == len(found)


def no_answer(_: Remembered, func: Any, __: Any, args: Any = (), kwargs: Any = None) -> Any:
    return func(*args, **(kwargs or {}))


# The class of each cache, and the method and its replacement that disable the cache.
SHORTCUTS: list[tuple[type, str, Callable[..., object]]] = [
    (Remembered, "__torch_dispatch__", no_answer),
    (Alike, "behaviour", lambda *_, **__: None),
]


def block() -> Sequential:
    return Sequential(Linear(8, 16), LayerNorm(16), ReLU(), Linear(16, 8))


def small() -> Sequential:
    last = [GELU(), Identity(), Dropout(), Linear(8, 8, bias=False)]
    return Sequential(Linear(8, 8), block(), block(), block(), *last)


AMOEBANET_D = pytest.param(lambda: amoebanetd(3, 32), (3, 224, 224), marks=pytest.mark.slow)
RESNET_101 = pytest.param(resnet101, (3, 64, 64), marks=pytest.mark.slow)


@pytest.mark.parametrize("owner, name, replacement", SHORTCUTS, ids=["operators", "layers"])
@pytest.mark.parametrize(
    ("build", "shape"),
    [(small, (8,)), (blocks, (8,)), (lambda: unet(2, 1, 4), (3, 16, 16)), AMOEBANET_D, RESNET_101],
)
def test_counts_are_the_same_without(
    build: Any,
    shape: Any,
    owner: type,
    name: str,
    replacement: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with torch.device("meta"):
        model = build()
        fast = count(model, meta(1, *shape))
        monkeypatch.setattr(owner, name, replacement)
        again = count(model, meta(1, *shape))
    if owner is not Alike:  # without it, storages get other numbers
        assert again == fast
    assert again.at(3) == fast.at(3)
    balance = (3, len(model) - 3)
    setup = Setup(6, balance, 2, "except_last", Optimizer(state=1))
    assert setup_memory(again, setup) == setup_memory(fast, setup)


def test_layers_are_counted_anew_under_another_autocast() -> None:
    alike = Alike()
    x = torch.empty(1, 8)
    for autocast in (None, torch.float16, torch.bfloat16):
        anew = count(small(), x, autocast=autocast)
        with_cache = count(small(), x, autocast=autocast, alike=alike)
        assert with_cache.at(3) == anew.at(3)
