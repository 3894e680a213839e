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

from torchgpipe import GPipe

BALANCE = [2, 1, 2]


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Sigmoid(), nn.Linear(6, 4))


class Fan(nn.Module):
    """Return two outputs, each with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 4), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x), self.other(x)


def fan() -> nn.Sequential:
    return nn.Sequential(*layers()[:4], Fan())


def pair(way: dict[str, Any], plainly: Any, build: Callable[[], nn.Sequential] = layers, chunks: int = 3) -> Any:
    """Return a plain model and its pipeline, of equal but separate parameters."""
    module = build()
    plain = plainly(copy.deepcopy(module), chunks)
    return plain, GPipe(module, BALANCE, devices=["cpu"] * len(BALANCE), chunks=chunks, **way)


def grads(model: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in model.parameters()]


def assert_same_grads(model: nn.Module, plain: nn.Module, **tolerance: float) -> None:
    for ours, theirs in zip(grads(model), grads(plain), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, **(tolerance or {"rtol": 0, "atol": 0}))


# A sum of gradients that is added up in another order: float32 has 24 bits, and the terms are of order 100 at most.
REORDERED = {"rtol": 1e-5, "atol": 1e-4}


FROZEN = {
    "nothing": [],
    "a weight": ["2.weight"],
    "the first layer": ["0."],
    "the middle partition": ["2."],
    "the last partition": ["4."],
    "all but the first": ["2.", "4."],
    "all but the last": ["0.", "2."],
    "everything": [""],
}


@pytest.mark.parametrize("grad", [True, False], ids=["input takes a gradient", "input takes none"])
@pytest.mark.parametrize("prefixes", FROZEN.values(), ids=FROZEN)
def test_frozen_parameters(
    prefixes: list[str], grad: bool, way: dict[str, Any], equals_plain: Callable[..., Any]
) -> None:
    def freeze(module: nn.Sequential) -> None:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not any(name.startswith(prefix) for prefix in prefixes))

    backward = {} if grad or prefixes != [""] else {"backward": None}
    outcome = equals_plain(layers, torch.randn(7, 5).requires_grad_(grad), BALANCE, prepare=freeze, **backward, **way)
    assert outcome.takes_grad["output 0"] == (not backward)


def test_thawing_between_steps(way: dict[str, Any], plainly: Any) -> None:
    plain, model = pair(way, plainly)
    x = torch.randn(7, 5)
    for frozen in (True, False, True):
        for run in (plain, model):
            run.zero_grad()
            next(run.parameters()).requires_grad_(not frozen)
            run(x).square().sum().backward()
        assert_same_grads(model, plain)


# What to go backward from, given a tuple of outputs with 4 and 3 features, of 7 samples in chunks of 3.
PARTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "the one": lambda a, b: a.square().sum(),
    "the other": lambda a, b: b.square().sum(),
    "first sample": lambda a, b: a[0].sum() + b[0].sum(),
    "last sample": lambda a, b: a[-1].sum(),
    "middle micro-batch": lambda a, b: b[3:6].exp().sum(),
    "one feature": lambda a, b: a[:, 1].square().sum(),
    "different samples": lambda a, b: a[:2].sum() * b[5:].sum(),
    "indexed": lambda a, b: a[[0, 5, 5]].square().sum(),
    "one through a detour": lambda a, b: (a + b.detach().sum()).square().sum(),
    "unbound": lambda a, b: a.unbind(0)[4].sum(),
}


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_parts_of_the_outputs(
    part: Callable[..., Tensor], chunks: int, way: dict[str, Any], equals_plain: Callable[..., Any]
) -> None:
    def backward(outputs: tuple[Tensor, Tensor]) -> None:
        part(*outputs).backward()

    x = torch.randn(7, 5).requires_grad_()
    equals_plain(fan, x, BALANCE, chunks=chunks, backward=backward, **way)


def test_gradients_given_by_the_caller(way: dict[str, Any], equals_plain: Callable[..., Any]) -> None:
    weights = torch.randn(7, 4).expand(7, 4), torch.tensor(2.0).expand(7, 3)
    x = torch.randn(7, 5).requires_grad_()
    equals_plain(fan, x, BALANCE, backward=lambda outputs: torch.autograd.backward(outputs, weights), **way)


@pytest.mark.parametrize("chunks", [1, 3])
def test_twice_with_retain_graph(chunks: int, way: dict[str, Any], plainly: Any) -> None:
    plain, model = pair(way, plainly, chunks=chunks)
    x = torch.randn(7, 5)
    for run in (plain, model):
        y = run(x).square().sum()
        y.backward(retain_graph=True)
        y.backward(retain_graph=True)
        y.backward()
    # The second and third sum is added to what .grad holds at once by the plain run, term by term by the other.
    assert_same_grads(model, plain, **REORDERED)


def test_one_output_after_the_other(way: dict[str, Any], plainly: Any) -> None:
    plain, model = pair(way, plainly, fan)
    x = torch.randn(7, 5)
    for run in (plain, model):
        one, other = run(x)
        one.square().sum().backward(retain_graph=True)
        other.square().sum().backward()
    # As above.
    assert_same_grads(model, plain, **REORDERED)


@pytest.mark.parametrize("chunks", [1, 3])
def test_twice_without_retain_graph(chunks: int, way: dict[str, Any], plainly: Any) -> None:
    _, model = pair(way, plainly, chunks=chunks)
    y = model(torch.randn(7, 5))
    y.sum().backward()
    before = [None if g is None else g.clone() for g in grads(model)]
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        y.sum().backward()
    if way["engine"] == "workers":
        assert all(map(torch.equal, grads(model), before))  # type: ignore[arg-type]


# Other ways to ask for gradients than `backward()`: what is found, of a loss, the input and the model.
ASKED: dict[str, Callable[[Tensor, Tensor, nn.Module], Any]] = {
    "grad of the input": lambda loss, x, model: torch.autograd.grad(loss, x),
    "grad of parameters": lambda loss, x, model: torch.autograd.grad(loss, [*model.parameters()]),
    "grad of both": lambda loss, x, model: torch.autograd.grad(loss, [x, *model.parameters()]),
    "grad of one": lambda loss, x, model: torch.autograd.grad(loss, [*model.parameters()][1]),
    "grad twice": lambda loss, x, model: (
        torch.autograd.grad(loss, [x, *model.parameters()], retain_graph=True)
        + torch.autograd.grad(loss, [x, *model.parameters()])
    ),
    "grad of the input, then backward": lambda loss, x, model: (
        *torch.autograd.grad(loss, x, retain_graph=True), loss.backward(), *grads(model)
    ),
    "backward of the input": lambda loss, x, model: (loss.backward(inputs=[x]), x.grad, *grads(model)),
    "backward of a parameter": lambda loss, x, model: (
        loss.backward(inputs=[[*model.parameters()][2]]), x.grad, *grads(model)
    ),
}  # fmt: skip


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
@pytest.mark.parametrize("chunks", [1, 3])
def test_ways_to_ask_for_gradients(asked: Callable[..., Any], chunks: int, way: dict[str, Any], plainly: Any) -> None:
    plain, model = pair(way, plainly, chunks=chunks)
    x = torch.randn(7, 5)
    found = []
    for run in (plain, model):
        given = x.clone().requires_grad_()
        found.append(asked(run(given).square().sum(), given, run))
    for theirs, ours in zip(*found, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)


@pytest.mark.parametrize("chunks", [1, 3])
def test_hooks_of_parameters_run_once_a_step(chunks: int, way: dict[str, Any], plainly: Any) -> None:
    plain, model = pair(way, plainly, chunks=chunks)
    seen: dict[nn.Module, list[Any]] = {plain: [], model: []}
    for run, calls in seen.items():
        for name, p in run.named_parameters():
            key = name.removeprefix("layers.")
            p.register_hook(lambda g, key=key, calls=calls: calls.append((key, g.clone())) or 2 * g)
            p.register_post_accumulate_grad_hook(lambda p, key=key, calls=calls: calls.append((key, p.grad.clone())))
    for x in torch.randn(3, 7, 5):
        for run, calls in seen.items():
            calls.clear()
            run(x).square().sum().backward()
        ours, theirs = (sorted(seen[run], key=lambda call: call[0]) for run in (model, plain))
        assert [key for key, _ in ours] == [key for key, _ in theirs]
        # Each step is added to the last one's gradients at once by both.
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(ours, theirs, strict=True))


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize("chunks", [1, 3])
def test_a_backward_of_the_backward(chunks: int, way: dict[str, Any], plainly: Any) -> None:
    plain, model = pair(way, plainly, chunks=chunks)
    recomputed = way["checkpoint"] == "always" or (way["checkpoint"] == "except_last" and chunks > 1)
    x = torch.randn(7, 5)
    if way["engine"] == "graph" and not recomputed:
        second = []
        for run in (plain, model):
            given = x.clone().requires_grad_()
            (first,) = torch.autograd.grad(run(given).square().sum(), given, create_graph=True)
            second.append(torch.autograd.grad(first.square().sum(), given)[0])
        assert torch.equal(*second)
        return
    y = model(x.requires_grad_())
    with pytest.raises(RuntimeError, match="create_graph=True"):
        y.sum().backward(create_graph=True)
    assert all(g is None for g in grads(model))
    # It cost nothing: the graph is still there.
    y.sum().backward()
    assert all(g is not None for g in grads(model))


def test_a_graph_that_a_layer_keeps(way: dict[str, Any]) -> None:
    """Such as an auxiliary loss: what goes backward through it must not be lost."""

    class Penalty(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.penalty = self.weight.square().sum()
            return super().forward(x)

    model = GPipe(nn.Sequential(Penalty(5, 5), nn.Linear(5, 5)), [1, 1], devices=["cpu"] * 2, chunks=3, **way)
    loss = model(torch.randn(7, 5)).sum() + model[0].penalty
    if way["checkpoint"] == "always":
        assert not model[0].penalty.requires_grad  # the guide says so
    elif way["engine"] == "graph" and way["checkpoint"] == "never":
        loss.backward()
        assert not torch.equal(model[0].weight.grad, torch.zeros(5, 5))
    else:
        with pytest.raises(RuntimeError, match="a layer keeps a tensor that has a graph"):
            loss.backward()


def test_several_mini_batches_before_one_backward(way: dict[str, Any], plainly: Any) -> None:
    plain, model = pair(way, plainly)
    xs = torch.randn(3, 7, 5)
    for run in (plain, model):
        torch.stack([run(x).square().sum() for x in xs]).sum().backward()
    # A plain parameter adds all nine micro-batches up before .grad, a pipeline those of each mini-batch.
    assert_same_grads(model, plain, **REORDERED)


def test_several_backwards_before_one_step(way: dict[str, Any], plainly: Any) -> None:
    plain, model = pair(way, plainly)
    for x in torch.randn(3, 7, 5):
        for run in (plain, model):
            run(x).square().sum().backward()
    # As with retain_graph.
    assert_same_grads(model, plain, **REORDERED)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first first", "last first"])
def test_two_forwards_then_two_backwards(order: tuple[int, int], way: dict[str, Any], plainly: Any) -> None:
    plain, model = pair(way, plainly)
    xs = torch.randn(2, 7, 5)
    for run in (plain, model):
        losses = [run(x).square().sum() for x in xs]
        for k in order:
            losses[k].backward()
    # As with retain_graph.
    assert_same_grads(model, plain, **REORDERED)


def test_one_pipeline_after_itself(way: dict[str, Any], plainly: Any) -> None:
    def square() -> nn.Sequential:
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Sigmoid(), nn.Linear(7, 5))

    plain, model = pair(way, plainly, square)
    x = torch.randn(7, 5)
    for run in (plain, model):
        run(run(x)).square().sum().backward()
    # A plain parameter adds both uses up before .grad, a pipeline those of each use.
    assert_same_grads(model, plain, **REORDERED)


@pytest.mark.parametrize("balance", [[4], [2, 2], [1, 1, 2]], ids=str)
def test_a_parameter_in_two_layers(balance: list[int], way: dict[str, Any], equals_plain: Callable[..., Any]) -> None:
    def tied() -> nn.Sequential:
        module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 6))
        module[3].weight = module[0].weight
        return module

    # A pipeline adds up each partition's share before it adds the shares; in one partition, each task's.
    equals_plain(tied, torch.randn(7, 6).requires_grad_(), balance, tolerance=REORDERED, **way)


class Pause(nn.Module):
    """Let the threads take turns in another order each time."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(1e-3 * random.random())
        return x.sin()


def test_a_parameter_in_two_partitions_gets_the_same_bits_every_time(way: dict[str, Any]) -> None:
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    second.weight = first.weight
    module = nn.Sequential(nn.Sequential(first, Pause()), nn.Sequential(second, Pause()))
    model = GPipe(module, [1, 1], devices=["cpu"] * 2, chunks=7, **way)
    x, found = torch.randn(7, 6), []
    for _ in range(10):
        model.zero_grad()
        model(x).exp().sum().backward()
        assert first.weight.grad is not None
        found.append(first.weight.grad)
    assert all(torch.equal(found[0], grad) for grad in found)


def test_hooks_on_outputs(way: dict[str, Any], equals_plain: Callable[..., Any]) -> None:
    def backward(y: Tensor) -> None:
        y.register_hook(lambda grad: grad * 3)
        y.square().sum().backward()

    equals_plain(layers, torch.randn(7, 5).requires_grad_(), BALANCE, backward=backward, **way)


def test_hooks_on_layers(way: dict[str, Any], equals_plain: Callable[..., Any]) -> None:
    def hooked(module: nn.Sequential) -> None:
        module[2].register_full_backward_hook(lambda layer, grads, _: tuple(g * 2 for g in grads))
        module[3].register_forward_hook(lambda layer, args, y: y * 3)

    equals_plain(layers, torch.randn(7, 5).requires_grad_(), BALANCE, prepare=hooked, **way)


@pytest.mark.parametrize("chunks", [1, 3])
def test_outputs_changed_in_place(chunks: int, way: dict[str, Any], equals_plain: Callable[..., Any]) -> None:
    def backward(outputs: tuple[Tensor, Tensor]) -> None:
        one, other = outputs
        one.add_(1).mul_(2)
        other.sin_()
        (one.square().sum() + other.sum()).backward()

    x = torch.randn(7, 5).requires_grad_()
    equals_plain(fan, x, BALANCE, chunks=chunks, backward=backward, **way)


@pytest.mark.parametrize("checkpoint", ["except_last", "never"])
def test_changing_an_output_that_backward_needs_is_noticed(checkpoint: str, engine: str) -> None:
    # Sigmoid's backward needs its output. One micro-batch, since concatenation makes a copy.
    module = nn.Sequential(nn.Linear(5, 5), nn.Sigmoid())
    model = GPipe(module, [1, 1], devices=["cpu"] * 2, checkpoint=checkpoint, engine=engine)  # type: ignore[arg-type]
    y = model(torch.randn(7, 5))
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
