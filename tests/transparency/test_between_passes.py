"""Between forward and backward anything may change; a recomputation meets what its first pass met, or says so."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations

from ..plain import piped
from .compare import assert_same_use

BALANCE = [2, 2]


class Scale(nn.Module):
    """Scale by a constant buffer of `size` elements."""

    by: Tensor

    def __init__(self, size: int = 1) -> None:
        super().__init__()
        self.register_buffer("by", torch.full((size,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by[:1].clone()


class Counting(Scale):
    """Scale by how often it ran in training, of which the second pass must not know."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.by += 1
        return super().forward(x)


class Block(nn.Module):
    """Something inside of a layer, that may be replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(5)
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x)).tanh()


def layers(last: Callable[[], nn.Module] = nn.Tanh) -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.0), Block(), last())


def loss_of(run: nn.Module) -> Tensor:
    y: Tensor = run(torch.randn(9, 5))
    return y.square().sum()


def trained(run: nn.Module) -> None:
    for _ in range(3):
        run.zero_grad()
        loss_of(run).backward()


# What may happen between forward and backward without any consequence, given a layer to do it to.
HARMLESS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], object]]] = {
    "evaluation of one layer": (lambda: nn.BatchNorm1d(5), lambda run: run[3].eval()),
    "training of a frozen norm": (lambda: nn.BatchNorm1d(5).eval(), lambda run: run[3].train()),
    "a constant": (Scale, lambda run: run[3].by.fill_(7)),
    "a constant that is replaced": (Scale, lambda run: setattr(run[3], "by", torch.full((1,), 7.0))),
    "a large constant that is replaced": (
        lambda: Scale(1 << 15), lambda run: setattr(run[3], "by", torch.full((1,), 7.0)),
    ),
    "a parameter that is replaced": (
        nn.Tanh, lambda run: setattr(run[0], "weight", nn.Parameter(torch.zeros(5, 5))),
    ),
    "a parameter's data": (nn.Tanh, lambda run: setattr(run[0].weight, "data", torch.zeros(5, 5))),
    "a parameter that is frozen": (nn.Tanh, lambda run: run[0].weight.requires_grad_(False)),
    "random numbers": (nn.Tanh, lambda run: torch.manual_seed(3)),
}  # fmt: skip


@pytest.mark.parametrize("last, change", HARMLESS.values(), ids=HARMLESS)
def test_harmless(last: Any, change: Callable[[Any], object], way: dict[str, Any]) -> None:
    def use(run: nn.Module) -> list[Tensor | None]:
        parameters = [*run.parameters()]
        loss = loss_of(run)
        change(run)
        loss.backward()
        return [p.grad for p in parameters]

    assert_same_use(use, layers(last), BALANCE, **way)


# What is refused, with what says so: by the recomputation, or by autograd, as without a pipeline.
REFUSED: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor], object], str]] = {
    "a parameter": (nn.Tanh, lambda model, x: model[0].weight.detach().add_(1), "'weight'"),
    "a frozen parameter": (
        lambda: nn.Linear(5, 5).requires_grad_(False), lambda model, x: model[3].weight.add_(1), "'weight'",
    ),
    "a large constant": (lambda: Scale(1 << 15), lambda model, x: model[3].by.add_(1), "'by'"),
    "the input": (nn.Tanh, lambda model, x: x.add_(1), "input of partition 0"),
    "an inner layer": (nn.Tanh, lambda model, x: setattr(model[2], "norm", nn.Identity()), "was replaced"),
    "an adapter": (nn.Tanh, lambda model, x: setattr(model[2], "adapter", nn.Linear(5, 5)), "was replaced, added"),
    "a parametrization": (nn.Tanh, lambda model, x: parametrizations.weight_norm(model[2].linear), "was replaced"),
}  # fmt: skip


@pytest.mark.parametrize("last, change, message", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
def test_refused(last: Any, change: Any, message: str, way: dict[str, Any]) -> None:
    model, x = piped(layers(last), BALANCE, **way), torch.randn(9, 5)
    y = model(x)
    change(model, x)
    with pytest.raises(RuntimeError, match=rf"{message}|modified by an inplace operation") as caught:
        y.square().sum().backward()
    if way["checkpoint"] == "always":
        assert "inplace operation" not in str(caught.value)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("size, refused", [(1, False), (1 << 15, True)], ids=["small", "large"])
def test_a_buffer_that_changes_with_every_pass(size: int, refused: bool, way: dict[str, Any]) -> None:
    module = layers(lambda: Counting(size))
    if refused and way["checkpoint"] != "never":
        with pytest.raises(RuntimeError, match=r"buffer 'by' of Counting in partition 1 was changed in forward"):
            loss_of(piped(module, BALANCE, **way))
    else:
        assert_same_use(trained, module, BALANCE, **way)


def test_functional_call(way: dict[str, Any]) -> None:
    """With parameters that are computed, and a buffer."""

    def use(run: nn.Module) -> list[Tensor | None]:
        given = {name: torch.randn_like(p).requires_grad_() for name, p in run.named_parameters()}
        state = {name: p * 2 for name, p in given.items()} | {"3.by": torch.full((1,), 3.0)}
        loss = functional_call(run, state, torch.randn(9, 5)).square().sum()
        loss.backward()
        assert all(p.grad is None for p in run.parameters())
        return [loss.detach(), *(p.grad for p in given.values())]

    assert_same_use(use, layers(Scale), BALANCE, **way)


class Loss(Tensor):
    """A tensor subclass, whose backward runs with PyTorch's functions hidden from subclasses."""


class Watching(nn.Module):
    """Behave otherwise where functions are hidden."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (2 if torch._C._is_torch_function_enabled() else 3)


def test_a_loss_that_is_a_tensor_subclass(way: dict[str, Any]) -> None:
    assert_same_use(lambda run: loss_of(run).as_subclass(Loss).backward(), layers(Watching), BALANCE, **way)


by = contextvars.ContextVar("by", default=3.0)


class ScaleBy(nn.Module):
    """Scale by a context variable."""

    def forward(self, x: Tensor) -> Tensor:
        return x * by.get()


def test_a_context_variable(way: dict[str, Any]) -> None:
    def use(run: nn.Module) -> None:
        token = by.set(2.0)
        loss = loss_of(run)
        by.reset(token)
        loss.backward()

    assert_same_use(use, nn.Sequential(nn.Linear(5, 5), ScaleBy(), nn.Linear(5, 5), ScaleBy()), BALANCE, **way)


@pytest.mark.parametrize("replacement", [lambda: nn.BatchNorm1d(5), lambda: nn.Dropout(0.0)], ids=["norm", "dropout"])
def test_the_inside_of_a_layer_is_replaced_between_steps(
    replacement: Callable[[], nn.Module], way: dict[str, Any]
) -> None:
    def use(run: Any) -> None:
        trained(run)
        run[2].norm = replacement()
        trained(run)

    assert_same_use(use, layers(), BALANCE, **way)
