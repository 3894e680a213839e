"""Tuples go in, between partitions and out, with tensors that take no gradient or cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe import GPipe


class Lambda(nn.Module):
    """A layer without parameters, by a function of the tensors it is given."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Tensor | tuple[Tensor, ...]) -> Any:
        return self.function(value) if isinstance(value, Tensor) else self.function(*value)


class First(nn.Module):
    """Apply `layer` to the first tensor of a tuple and pass on the others."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, value: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (self.layer(value[0]), *value[1:])


@dataclass
class Case:
    """Layers, one function or module each; inputs of 7 samples; layers per partition."""

    layers: Callable[[], list[Any]]
    inputs: Callable[[], Any]
    balance: tuple[int, ...] = (1, 1, 1)

    def build(self) -> nn.Sequential:
        return nn.Sequential(*(x if isinstance(x, nn.Module) else Lambda(x) for x in self.layers()))


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def real(*, grad: bool = True) -> Tensor:
    return torch.randn(7, 4).requires_grad_(grad)


def ids() -> Tensor:
    return torch.arange(7).remainder(5)


CASES = {
    "in": Case(lambda: [lambda a, b: a * b, linear(), linear()], lambda: (real(), real())),
    "in, one without grad": Case(lambda: [lambda a, b: a * b, linear(), linear()], lambda: (real(grad=False), real())),
    "in, unused": Case(lambda: [lambda a, b: a, linear(), linear()], lambda: (real(), real())),
    "of one": Case(lambda: [lambda a: (a,), First(linear()), First(linear())], lambda: (real(),)),
    "between": Case(lambda: [linear(), lambda a: (a, a * 2), lambda a, b: a * b, linear()], real, (2, 1, 1)),
    "between, one unused": Case(
        lambda: [linear(), lambda a: (a.sin(), a.exp()), lambda a, b: b, linear()], real, (2, 1, 1)
    ),
    "out": Case(lambda: [linear(), linear(), lambda a: (a, a.sum(1))], real),
    "all the way": Case(lambda: [First(linear()), First(linear()), First(linear())], lambda: (real(), real())),
    "longer and shorter": Case(
        lambda: [lambda a, b: (a, b, a + b), lambda a, b, c: (a * c, b), lambda a, b: (a, b, a, b)],
        lambda: (real(), real()),
    ),
    "the same tensor twice": Case(lambda: [lambda a: (a, a), lambda a, b: a * b, linear()], real),
    "an input is an output": Case(lambda: [lambda a: a, lambda a: (a, a.exp()), lambda a, b: (b, a)], real),
    "views": Case(
        lambda: [lambda a: (a[:, :2], a.view(-1, 2, 2)), lambda a, b: a + b.sum(1), lambda a: a.t().t()], real
    ),
    "embedding": Case(lambda: [nn.Embedding(5, 4), linear(), linear()], ids),
    "an integer goes along": Case(
        lambda: [First(linear()), lambda a, k: (a * (1 + k).unsqueeze(1), k), lambda a, k: (a[:, :2], k)],
        lambda: (real(grad=False), ids()),
    ),
    "an integer is made": Case(
        lambda: [linear(), lambda a: (a, a.argmax(1)), lambda a, k: (a.gather(1, k.unsqueeze(1)), k)], real
    ),
    "an integer is first": Case(
        lambda: [lambda a: (a.argmax(1), a), lambda k, a: (k, a.exp()), lambda k, a: (k, a)], real
    ),
    "mask": Case(lambda: [linear(), lambda a: (a, a > 0), lambda a, b: (a.masked_fill(b, 0.5), b)], real),
    "detached": Case(lambda: [linear(), lambda a: (a, a.detach()), lambda a, b: (a * b, b)], real),
    "indices of a sort": Case(lambda: [linear(), lambda a: tuple(a.sort(1)), lambda a, k: (a, k)], real),
    "constants": Case(lambda: [linear(), lambda a: (a, torch.ones(len(a), 1)), lambda a, b: a * b], real),
    "nothing takes grad": Case(lambda: [lambda a, k: (a, k)] * 3, lambda: (real(grad=False), ids())),
    "only integers": Case(lambda: [lambda k: k + 1, lambda k: (k, k), lambda k, n: k * n], ids),
    "no parameters": Case(lambda: [torch.sin, torch.exp, torch.square], real),
}


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_tuples(case: Case, chunks: int, way: dict[str, Any], equals_plain: Callable[..., Any]) -> None:
    inputs = case.inputs()
    grads = any(x.requires_grad for x in ([inputs] if isinstance(inputs, Tensor) else inputs))
    backward = {} if grads or any(True for _ in case.build().parameters()) else {"backward": None}
    equals_plain(case.build, inputs, list(case.balance), chunks=chunks, **backward, **way)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_in_one_partition(case: Case, way: dict[str, Any], equals_plain: Callable[..., Any]) -> None:
    inputs = case.inputs()
    grads = any(x.requires_grad for x in ([inputs] if isinstance(inputs, Tensor) else inputs))
    backward = {} if grads or any(True for _ in case.build().parameters()) else {"backward": None}
    equals_plain(case.build, inputs, [sum(case.balance)], **backward, **way)


@pytest.mark.parametrize("chunks", [1, 3])
def test_integers_take_no_gradient(chunks: int, way: dict[str, Any]) -> None:
    case = CASES["an integer is made"]
    y, k = GPipe(case.build(), case.balance, devices=["cpu"] * 3, chunks=chunks, **way)(real())
    assert y.requires_grad and not k.requires_grad
