"""Between forward and backward anything may change; a recomputation meets what its first pass met, or says so."""

from __future__ import annotations

import contextvars
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize

from torchgpipe import GPipe

BALANCE = [2, 2]
CHUNKS = 3


class Scale(nn.Module):
    """Scale by a constant buffer of `size` elements."""

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


def pair(way: dict[str, Any], plainly: Any, module: nn.Sequential) -> tuple[nn.Module, GPipe]:
    plain = plainly(copy.deepcopy(module), CHUNKS)
    return plain, GPipe(module, BALANCE, devices=["cpu"] * 2, chunks=CHUNKS, **way)


def assert_alike(model: nn.Module, plain: Any) -> None:
    for (name, p), q in zip(model.named_parameters(), plain.layers.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or torch.equal(p.grad, q.grad), name
    for (name, b), c in zip(model.named_buffers(), plain.layers.buffers(), strict=True):
        assert torch.equal(b, c), name


# What may happen between forward and backward without any consequence, given a layer to do it to.
HARMLESS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Sequential], object]]] = {
    "evaluation": (lambda: nn.BatchNorm1d(5), lambda module: module.eval()),
    "evaluation of one layer": (lambda: nn.BatchNorm1d(5), lambda module: module[3].eval()),
    "training of a frozen norm": (lambda: nn.BatchNorm1d(5).eval(), lambda module: module[3].train()),
    "a constant": (Scale, lambda module: module[3].by.fill_(7)),
    "a constant that is replaced": (Scale, lambda module: setattr(module[3], "by", torch.full((1,), 7.0))),
    "a large constant that is replaced": (
        lambda: Scale(1 << 15), lambda module: setattr(module[3], "by", torch.full((1,), 7.0)),
    ),
    "a parameter that is replaced": (
        nn.Tanh, lambda module: setattr(module[0], "weight", nn.Parameter(torch.zeros(5, 5))),
    ),
    "a parameter's data": (nn.Tanh, lambda module: setattr(module[0].weight, "data", torch.zeros(5, 5))),
    "a parameter that is frozen": (nn.Tanh, lambda module: module[0].weight.requires_grad_(False)),
    "a forward of another mini-batch": (nn.Tanh, lambda module: module(torch.randn(4, 5))),
    "random numbers": (nn.Tanh, lambda module: torch.manual_seed(3)),
}  # fmt: skip


@pytest.mark.parametrize("last, change", HARMLESS.values(), ids=HARMLESS)
def test_harmless(last: Any, change: Callable[[Any], object], way: dict[str, Any], plainly: Any) -> None:
    plain, model = pair(way, plainly, layers(last))
    parameters = [[*run.parameters()] for run in (plain, model)]
    x = torch.randn(9, 5)
    for run, module in ((plain, plain.layers), (model, model[:])):
        y = run(x)
        change(module)
        y.square().sum().backward()
    for q, p in zip(*parameters, strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or torch.equal(p.grad, q.grad)


def first_of(model: GPipe) -> Any:
    return next(model.parameters())


# What is refused, with what says so: by the recomputation, or by autograd, as without a pipeline.
REFUSED: dict[str, tuple[Callable[[], nn.Module], Callable[[GPipe, Tensor], object], str]] = {
    "a parameter": (nn.Tanh, lambda model, x: _add_to(first_of(model)), "'weight'"),
    "a frozen parameter": (
        lambda: nn.Linear(5, 5).requires_grad_(False), lambda model, x: _add_to(model[3].weight), "'weight'",
    ),
    "a large constant": (lambda: Scale(1 << 15), lambda model, x: model[3].by.add_(1), "'by'"),
    "the input": (nn.Tanh, lambda model, x: x.add_(1), "input of partition 0"),
    "an inner layer": (nn.Tanh, lambda model, x: setattr(model[2], "norm", nn.Identity()), "was replaced"),
    "an adapter": (nn.Tanh, lambda model, x: setattr(model[2], "adapter", nn.Linear(5, 5)), "was replaced, added"),
    "a parametrization": (nn.Tanh, lambda model, x: parametrizations.weight_norm(model[2].linear), "was replaced"),
}  # fmt: skip


def _add_to(p: Tensor) -> None:
    with torch.no_grad():
        p.add_(1)


@pytest.mark.parametrize("last, change, message", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
def test_refused(last: Any, change: Any, message: str, checkpoint: str, engine: str) -> None:
    module = layers(last)
    model = GPipe(module, BALANCE, devices=["cpu"] * 2, chunks=CHUNKS, checkpoint=checkpoint, engine=engine)  # type: ignore[arg-type]
    x = torch.randn(9, 5)
    y = model(x)
    change(model, x)
    with pytest.raises(RuntimeError, match=rf"{message}|modified by an inplace operation") as caught:
        y.square().sum().backward()
    if checkpoint == "always":
        assert "inplace operation" not in str(caught.value)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("size, refused", [(1, False), (1 << 15, True)], ids=["small", "large"])
def test_a_buffer_that_changes_with_every_pass(size: int, refused: bool, way: dict[str, Any], plainly: Any) -> None:
    plain, model = pair(way, plainly, layers(lambda: Counting(size)))
    if refused and way["checkpoint"] != "never":
        with pytest.raises(RuntimeError, match=r"buffer 'by' of Counting in partition 1 was changed in forward"):
            model(torch.randn(9, 5))
        return
    for x in torch.randn(3, 9, 5):
        for run in (plain, model):
            run.zero_grad()
            run(x).square().sum().backward()
        assert_alike(model, plain)


NORMED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "spectral norm": parametrizations.spectral_norm,
    "spectral norm by a hook": nn.utils.spectral_norm,
    "weight norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
}


@pytest.mark.parametrize("norm", NORMED.values(), ids=NORMED)
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.spectral_norm` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def test_weights_that_are_computed(norm: Any, way: dict[str, Any], equals_plain: Callable[..., Any]) -> None:
    def build() -> nn.Sequential:
        return nn.Sequential(nn.Linear(5, 5), norm(nn.Linear(5, 5)), norm(nn.Linear(5, 5)), nn.Tanh())

    # Spectral norm uses a weight twice: gradients of one task are added up before those of the next, in 24 bits.
    equals_plain(build, torch.randn(9, 5), BALANCE, steps=3, tolerance={"rtol": 1e-5, "atol": 1e-5}, **way)


def test_cached_parametrizations(way: dict[str, Any]) -> None:
    module = layers(lambda: parametrizations.weight_norm(nn.Linear(5, 5)))
    model = GPipe(module, BALANCE, devices=["cpu"] * 2, chunks=CHUNKS, **way)
    x = torch.randn(9, 5)
    expected = model(x)
    expected.sum().backward()
    grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    with parametrize.cached(), torch.no_grad():
        assert torch.equal(model(x), expected)
    if way["engine"] == "workers" or way["checkpoint"] != "never":
        with pytest.raises(RuntimeError, match=r"parametrize\.cached\(\)"), parametrize.cached():
            model(x)
        return
    with parametrize.cached():
        model(x).sum().backward()
    # Here, where all is one graph, gradients of the one weight are added up before those of its parameters, in 24 bits.
    for p, expected in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(p.grad, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("leaf", [True, False], ids=["leaves", "computed"])
@pytest.mark.parametrize("buffers", [True, False])
def test_functional_call(leaf: bool, buffers: bool, way: dict[str, Any], plainly: Any) -> None:
    plain, model = pair(way, plainly, layers(Scale))
    x, found = torch.randn(9, 5), []
    for run, prefix in ((plain, "layers."), (model, "")):
        torch.manual_seed(1)
        given = {name: torch.randn_like(p).requires_grad_() for name, p in model.named_parameters()}
        state = {prefix + name: p if leaf else p * 2 for name, p in given.items()}
        state |= {prefix + "3.by": torch.full((1,), 3.0)} if buffers else {}
        loss = functional_call(run, state, x).square().sum()
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in given.values())])
        assert all(p.grad is None for p in run.parameters())
    assert all(map(torch.equal, *found))


class Loss(Tensor):
    """A tensor subclass, whose backward runs with PyTorch's functions hidden from subclasses."""


class Watching(nn.Module):
    """Behave otherwise where functions are hidden."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (2 if torch._C._is_torch_function_enabled() else 3)


def test_a_loss_that_is_a_tensor_subclass(way: dict[str, Any], plainly: Any) -> None:
    plain, model = pair(way, plainly, layers(Watching))
    x = torch.randn(9, 5)
    for run in (plain, model):
        run(x).square().sum().as_subclass(Loss).backward()
    assert_alike(model, plain)


by = contextvars.ContextVar("by", default=3.0)


class ScaleBy(nn.Module):
    """Scale by a context variable."""

    def forward(self, x: Tensor) -> Tensor:
        return x * by.get()


def test_a_context_variable(way: dict[str, Any], plainly: Any) -> None:
    plain, model = pair(way, plainly, nn.Sequential(nn.Linear(5, 5), ScaleBy(), nn.Linear(5, 5), ScaleBy()))
    x = torch.randn(9, 5)
    for run in (plain, model):
        token = by.set(2.0)
        y = run(x)
        by.reset(token)
        y.square().sum().backward()
    assert_alike(model, plain)


# What may be done to the inside of a layer between steps; the model goes on with what is there.
REPLACED: dict[str, Callable[[nn.Sequential], object]] = {
    "a norm by another kind": lambda module: setattr(module[2], "norm", nn.BatchNorm1d(5)),
    "a layer by an adapter": lambda module: setattr(
        module[2], "linear", nn.Sequential(module[2].linear, nn.Linear(5, 5))
    ),
    "weight norm": lambda module: parametrizations.weight_norm(module[2].linear),
    "a parameter": lambda module: setattr(module[2].linear, "weight", nn.Parameter(torch.ones(5, 5))),
    "dropout": lambda module: setattr(module[2], "norm", nn.Dropout(0.0)),
}  # fmt: skip


@pytest.mark.parametrize("change", REPLACED.values(), ids=REPLACED)
def test_replaced_between_steps(change: Callable[[nn.Sequential], object], way: dict[str, Any], plainly: Any) -> None:
    plain, model = pair(way, plainly, layers())
    for step, x in enumerate(torch.randn(4, 9, 5)):
        if step == 1:
            for module in (plain.layers, model[:]):
                torch.manual_seed(2)
                change(module)
        for run in (plain, model):
            run.zero_grad()
            run(x).square().sum().backward()
        assert_alike(model, plain)


def test_a_partition_that_is_replaced_is_refused(way: dict[str, Any]) -> None:
    model = GPipe(layers(), BALANCE, devices=["cpu"] * 2, chunks=CHUNKS, **way)
    model.partitions[0] = nn.Sequential(nn.Linear(5, 5), nn.Tanh())
    with pytest.raises(RuntimeError, match="layer or partition was replaced"):
        model(torch.randn(9, 5))
