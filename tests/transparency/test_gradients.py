"""Backward: through frozen layers, through parts of the outputs, twice, accumulated, and in any order."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from ..plain import piped
from .compare import EXACT, REORDERED, Tolerance, assert_same_use, assert_transparent

BALANCE = [2, 1, 2]
both_chunks = pytest.mark.parametrize("chunks", [1, 3])


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Sigmoid(), nn.Linear(6, 5))


class Fan(nn.Module):
    """Return two outputs, each with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 4), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x), self.other(x)


def fan() -> nn.Sequential:
    return nn.Sequential(*layers()[:4], Fan())


def given() -> Tensor:
    return torch.randn(7, 5).requires_grad_()


FROZEN = {
    "nothing": [],
    "the first layer": ["0."],
    "the last partition": ["4."],
    "all but the first": ["2.", "4."],
    "all but the last": ["0.", "2."],
    "everything": [""],
}


@pytest.mark.parametrize("grad", [True, False], ids=["input takes a gradient", "input takes none"])
@pytest.mark.parametrize("prefixes", FROZEN.values(), ids=FROZEN)
def test_frozen_parameters(prefixes: list[str], grad: bool, way: dict[str, Any]) -> None:
    module = layers()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(prefixes)))
    outcome = assert_transparent(module, given().requires_grad_(grad), BALANCE, **way)
    assert outcome.takes_grad == [grad or prefixes != [""]]


# What to go backward from, given a tuple of outputs with 4 and 3 features, of 7 samples in chunks of 3.
PARTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "the one": lambda a, b: a.square().sum(),
    "the other": lambda a, b: b.square().sum(),
    "last sample": lambda a, b: a[-1].sum(),
    "middle micro-batch": lambda a, b: b[3:6].exp().sum(),
    "different samples": lambda a, b: a[:2].sum() * b[5:].sum(),
    "indexed": lambda a, b: a[[0, 5, 5]].square().sum(),
    "one through a detour": lambda a, b: (a + b.detach().sum()).square().sum(),
    "changed in place": lambda a, b: a.add_(1).mul_(2).square().sum() + b.sin_().sum(),
    "hooked": lambda a, b: (a.register_hook(lambda grad: grad * 3), a.square().sum() + b.sum())[1],
}


@both_chunks
@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_parts_of_the_outputs(part: Callable[..., Tensor], chunks: int, way: dict[str, Any]) -> None:
    assert_transparent(
        fan(), given(), BALANCE, chunks=chunks, backward=lambda outputs: part(*outputs).backward(), **way
    )


def loss_of(run: nn.Module, x: Tensor | None = None) -> Tensor:
    y: Tensor = run(torch.randn(7, 5) if x is None else x)
    return y.square().sum()


def thawed_between_steps(run: nn.Module) -> list[Tensor | None]:
    found = []
    for frozen in (True, False, True):
        run.zero_grad()
        next(run.parameters()).requires_grad_(not frozen)
        loss_of(run).backward()
        found += [None if p.grad is None else p.grad.clone() for p in run.parameters()]
    return found


def asked(ask: Callable[[Tensor, Tensor, list[nn.Parameter]], Any]) -> Callable[[nn.Module], Any]:
    """Ask for gradients of a loss, an input and all parameters."""

    def use(run: nn.Module) -> Any:
        x = given()
        return ask(loss_of(run, x), x, [*run.parameters()]), x.grad

    return use


def hooked_layers(run: Any) -> None:
    run[2].register_full_backward_hook(lambda layer, grads, _: tuple(g * 2 for g in grads))
    run[3].register_forward_hook(lambda layer, args, y: y * 3)
    loss_of(run).backward()


# What is done with a model. A plain parameter adds up all micro-batches' gradients before .grad, a pipeline those of
# each mini-batch and each backward: so some sums are only up to rounding.
USES: dict[str, tuple[Callable[[Any], Any], Tolerance]] = {
    "thawed between steps": (thawed_between_steps, EXACT),
    "gradients given by the caller": (
        lambda run: run(torch.randn(7, 5)).backward(torch.tensor(2.0).expand(7, 5)), EXACT
    ),
    "retain_graph, twice": (
        lambda run: [loss.backward(retain_graph=r) for loss in [loss_of(run)] for r in (True, True, False)], REORDERED
    ),
    "several mini-batches before a backward": (lambda run: (loss_of(run) + loss_of(run)).backward(), REORDERED),
    "several backwards before a step": (lambda run: [loss_of(run).backward() for _ in range(3)], REORDERED),
    "two forwards, then two backwards": (
        lambda run: [loss.backward() for loss in [loss_of(run), loss_of(run)]], REORDERED
    ),
    "two forwards, then two backwards, the last first": (
        lambda run: [loss.backward() for loss in [loss_of(run), loss_of(run)][::-1]], REORDERED
    ),
    "one after itself": (lambda run: loss_of(run, run(torch.randn(7, 5))).backward(), REORDERED),
    "hooks of layers": (hooked_layers, EXACT),
    "grad of one parameter": (asked(lambda loss, x, parameters: torch.autograd.grad(loss, parameters[1])), EXACT),
    "grad twice": (asked(lambda loss, x, parameters: [
        torch.autograd.grad(loss, [x, *parameters], retain_graph=retain) for retain in (True, False)
    ]), EXACT),
    "grad of the input, then backward": (asked(lambda loss, x, parameters: (
        torch.autograd.grad(loss, x, retain_graph=True), loss.backward()
    )), EXACT),
    "backward of one parameter": (asked(lambda loss, x, parameters: loss.backward(inputs=[parameters[2]])), EXACT),
}  # fmt: skip


@both_chunks
@pytest.mark.parametrize("use, tolerance", USES.values(), ids=USES)
def test_uses(use: Any, tolerance: Tolerance, chunks: int, way: dict[str, Any]) -> None:
    assert_same_use(use, layers(), BALANCE, chunks=chunks, tolerance=tolerance, **way)


def test_gradients_stay_where_they_are(way: dict[str, Any]) -> None:
    model = piped(layers(), BALANCE, **way)
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    views = flat.split([p.numel() for p in model.parameters()])
    for p, view in zip(model.parameters(), views, strict=True):
        p.grad = view.view_as(p)
    before = [p.grad for p in model.parameters()]
    for _ in range(2):
        model(torch.randn(7, 5)).square().sum().backward()
    assert all(p.grad is grad for p, grad in zip(model.parameters(), before, strict=True))
    assert all(bool(view.any()) for view in views[2:])


@both_chunks
def test_twice_without_retain_graph(chunks: int, way: dict[str, Any]) -> None:
    model = piped(layers(), BALANCE, chunks, **way)
    loss = model(torch.randn(7, 5)).sum()  # sums keep nothing, so that the pipeline itself must refuse
    loss.backward()
    before = copy.deepcopy([p.grad for p in model.parameters()])
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        loss.backward()
    if way["engine"] != "graph":
        assert_close([p.grad for p in model.parameters()], before, **EXACT)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
def test_a_backward_to_be_differentiated_is_refused_at_no_cost(way: dict[str, Any]) -> None:
    model = piped(layers(), BALANCE, **way)
    loss = loss_of(model, given())
    with pytest.raises(RuntimeError, match="create_graph=True"):
        loss.backward(create_graph=True)
    assert all(p.grad is None for p in model.parameters())
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_graph_that_a_layer_keeps(way: dict[str, Any]) -> None:
    """Such as an auxiliary loss: what goes backward through it must not be lost."""

    class Penalty(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.penalty = self.weight.square().sum()
            return super().forward(x)

    model = piped(nn.Sequential(Penalty(5, 5), nn.Linear(5, 5)), [1, 1], **way)
    loss = model(torch.randn(7, 5)).sum() + model[0].penalty
    if way["checkpoint"] == "always":
        assert not model[0].penalty.requires_grad  # the guide says so
    elif way["engine"] == "graph" and way["checkpoint"] == "never":
        loss.backward()
        assert not torch.equal(model[0].weight.grad, torch.zeros(5, 5))
    else:
        with pytest.raises(RuntimeError, match="a layer keeps a tensor that has a graph"):
            loss.backward()


class Pause(nn.Module):
    """Let the threads take turns in another order each time."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(1e-3 * random.random())
        return x.sin()


def test_a_parameter_in_two_partitions_gets_the_same_bits_every_time(way: dict[str, Any]) -> None:
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    second.weight = first.weight
    model = piped(nn.Sequential(nn.Sequential(first, Pause()), nn.Sequential(second, Pause())), [1, 1], 7, **way)
    x, found = torch.randn(7, 6), []
    for _ in range(10):
        model.zero_grad()
        model(x).exp().sum().backward()
        assert first.weight.grad is not None
        found.append(first.weight.grad)
    assert all(torch.equal(found[0], grad) for grad in found)


class Shifted(nn.Module):
    """Its gradient is a sum over positions, which rounds by the order that they have in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(32))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


class Turned(nn.Module):
    """The gradient of its input is not contiguous."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous().sin().transpose(1, 2)


def test_gradients_keep_their_strides_between_partitions(way: dict[str, Any]) -> None:
    layers = nn.Sequential(Shifted(), Turned(), Shifted(), Turned())
    assert_transparent(layers, torch.randn(6, 16, 32), [1, 2, 1], chunks=2, **way)
