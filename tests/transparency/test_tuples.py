"""Tuples go in, between partitions and out, with tensors that take no gradient or cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .compare import assert_transparent, tensors
from .layers import WIDTH, Do, linear
from .wiring import OnFirst


def first() -> nn.Module:
    return OnFirst(linear())


def real(*, grad: bool = True) -> Tensor:
    return torch.randn(7, WIDTH).requires_grad_(grad)


def ids() -> Tensor:
    return torch.arange(7).remainder(5)


def two() -> tuple[Tensor, Tensor]:
    return real(), real()


# Layers, a module or a function of the tensors each; inputs of 7 samples.
CASES: dict[str, tuple[Callable[[], list[Any]], Callable[[], Any]]] = {
    "in": (lambda: [lambda a, b: a * b, linear(), linear()], two),
    "in, one without grad": (lambda: [lambda a, b: a * b, linear(), linear()], lambda: (real(grad=False), real())),
    "in, unused": (lambda: [lambda a, b: a, linear(), linear()], two),
    "of one": (lambda: [lambda a: (a,), first(), first()], lambda: (real(),)),
    "between, one unused": (lambda: [linear(), lambda a: (a.sin(), a.exp()), lambda a, b: b, linear()], real),
    "out": (lambda: [linear(), linear(), lambda a: (a, a.sum(1))], real),
    "all the way": (lambda: [first(), first(), first()], two),
    "longer and shorter": (
        lambda: [lambda a, b: (a, b, a + b), lambda a, b, c: (a * c, b), lambda a, b: (a, b, a, b)], two
    ),
    "the same tensor twice": (lambda: [lambda a: (a, a), lambda a, b: a * b, linear()], real),
    "an input is an output": (lambda: [lambda a: a, lambda a: (a, a.exp()), lambda a, b: (b, a)], real),
    "views": (lambda: [lambda a: (a[:, :2], a.view(-1, 2, 2)), lambda a, b: a + b.sum(1), lambda a: a.t().t()], real),
    "embedding": (lambda: [nn.Embedding(5, WIDTH), linear(), linear()], ids),
    "an integer goes along": (
        lambda: [first(), lambda a, k: (a * (1 + k).unsqueeze(1), k), lambda a, k: (a[:, :2], k)],
        lambda: (real(grad=False), ids()),
    ),
    "an integer is made": (
        lambda: [linear(), lambda a: (a, a.argmax(1)), lambda a, k: (a.gather(1, k.unsqueeze(1)), k)], real
    ),
    "an integer is first": (lambda: [lambda a: (a.argmax(1), a), lambda k, a: (k, a.exp()), lambda k, a: (k, a)], real),
    "mask": (lambda: [linear(), lambda a: (a, a > 0), lambda a, b: (a.masked_fill(b, 0.5), b)], real),
    "detached": (lambda: [linear(), lambda a: (a, a.detach()), lambda a, b: (a * b, b)], real),
    "constants": (lambda: [linear(), lambda a: (a, torch.ones(len(a), 1)), lambda a, b: a * b], real),
    "nothing takes grad": (lambda: [lambda a, k: (a, k)] * 3, lambda: (real(grad=False), ids())),
    "only integers": (lambda: [lambda k: k + 1, lambda k: (k, k), lambda k, n: k * n], ids),
    "no parameters": (lambda: [torch.sin, torch.exp, torch.square], real),
}  # fmt: skip


def layer(given: Any) -> nn.Module:
    return given if isinstance(given, nn.Module) else Do(lambda _, value: given(*tensors(value)))


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("whole", [False, True], ids=["", "one partition"])
@pytest.mark.parametrize("layers, given", CASES.values(), ids=CASES)
def test_tuples(layers: Any, given: Any, whole: bool, chunks: int, way: dict[str, Any]) -> None:
    module = nn.Sequential(*map(layer, layers()))
    n = len(module)
    assert_transparent(module, given(), [n] if whole else [n - 2, 1, 1], chunks=chunks, **way)
