"""What is no row: several pipelines, several threads, other devices, and what only a pipeline can do."""

from __future__ import annotations

import copy
import random
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchgpipe import GPipe

from ..plain import Plain, piped
from .compare import REORDERED, differences
from .parts.draw import Draw, drawing
from .parts.layers import linear
from .row import step, total
from .rows.random import all_differ

BALANCE = [2, 2, 2]


def both(module: nn.Sequential, balance: list[int], chunks: int = 3, **options: Any) -> tuple[Plain, GPipe]:
    """Return the plain model and the pipeline of some layers, of equal but separate parameters."""
    return Plain(copy.deepcopy(module), chunks=chunks), piped(module, balance, chunks, **options)


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 4))


def test_two_pipelines_in_one_loss(way: dict[str, Any]) -> None:
    x, plain, models = torch.randn(9, 5), *zip(*(both(layers(), BALANCE, **way) for _ in range(2)), strict=True)
    for one, other in (plain, models):
        total((one(x) * other(x), other(x))).backward()
    # The second model is used twice: plain parameters add both uses up before .grad, piped ones each.
    assert differences(models, plain, REORDERED) == []


def test_a_pipeline_in_a_pipeline(way: dict[str, Any]) -> None:
    inner = piped(layers(), [3, 3], 2, **way)
    module = nn.Sequential(nn.Linear(5, 5), inner, nn.Tanh())
    # Both engines recompute and go backward per inner micro-batch, so gradients are added in another order.
    x = torch.randn(12, 5)
    plain, model = both(module, [1, 1, 1], **way)
    assert differences((step(model, x), model), (step(plain, x), plain), REORDERED) == []


def in_threads(*functions: Callable[[], object]) -> list[BaseException]:
    """Run functions at once, each in a thread of its own; return what they raised."""
    errors: list[BaseException] = []

    def run(function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def steps_of(run: nn.Module, xs: Tensor, outputs: list[Tensor]) -> Callable[[], None]:
    def steps() -> None:
        for x in xs:
            outputs.append(run(x))
            outputs[-1].square().sum().backward()

    return steps


STEPS = 12


# Both numbers are one parameter, so that every engine and mode runs with all four pairs. Whether two threads meet is a
# matter of chance, and few runs would miss it.
@pytest.mark.parametrize("case", [(2, 1), (2, 3), (1, 1), (1, 3)], ids=lambda case: "{} pipelines, m={}".format(*case))
def test_two_threads(case: tuple[int, int], way: dict[str, Any]) -> None:
    count, chunks = case
    pairs = [both(layers(), BALANCE, chunks=chunks, **way)] * 2
    if count == 2:
        pairs[1] = both(layers(), BALANCE, chunks=chunks, **way)
    xs = torch.randn(2, STEPS, 9, 5)
    outputs: list[list[Tensor]] = [[], []]
    expected: list[list[Tensor]] = [[], []]
    assert not in_threads(*(steps_of(pairs[k][1], xs[k], outputs[k]) for k in (0, 1)))
    for k in (0, 1):
        steps_of(pairs[k][0], xs[k], expected[k])()
    assert (
        differences([[y.detach() for y in ys] for ys in outputs], [[y.detach() for y in ys] for ys in expected]) == []
    )
    for plain, model in pairs:
        # Steps accumulate: sums in another order than the plain run's.
        ours, expected_grads = ([p.grad for p in run.parameters()] for run in (model, plain))
        assert differences(ours, expected_grads, REORDERED) == []
        assert model[1].num_batches_tracked == 2 // count * STEPS * chunks
        assert model[1].track_running_stats and model[1].running_mean is not None


@pytest.mark.filterwarnings("error")  # neither's numbers may be taken for a layer's that drew unexpectedly
def test_threads_that_draw_random_numbers(way: dict[str, Any]) -> None:
    drawing = piped(nn.Sequential(*layers()[:5], nn.Dropout()), BALANCE, **way)
    quiet = piped(layers(), BALANCE, **way)
    errors = in_threads(*(steps_of(model, torch.randn(10, 9, 5), []) for model in (drawing, quiet, drawing)))
    # The graph engine's tasks draw from the one default generator. Where threads came between, it must say so.
    one_generator = way["engine"] == "graph" and way["checkpoint"] != "never"
    assert all(one_generator and "more or fewer random numbers" in str(error) for error in errors)


def late(x: Tensor) -> Tensor:
    """Draw a moment later, so that threads take turns in any order."""
    time.sleep(3e-3 * random.random())
    return torch.rand_like(x)


def drawn(seed: int, draw: Callable[[Tensor], Tensor], **options: Any) -> list[Tensor]:
    """Return what three steps draw, with how the caller's own random numbers go on at the end."""
    module = nn.Sequential(linear(), Draw(draw), nn.Tanh(), Draw(draw), linear())
    model = piped(module, [2, 1, 2], 4, **options)
    torch.manual_seed(seed)
    for _ in range(3):
        all_differ(model, torch.ones(8, 4))
    return [*(x for layer in drawing(module) for x in layer.first), torch.rand(3)]


def test_the_seed_alone_decides_the_draws(engine: str) -> None:
    numbers = drawn(7, torch.rand_like, engine=engine)
    assert differences(numbers, drawn(8, torch.rand_like, engine=engine)) != []
    for checkpoint in ("never", "except_last", "always"):
        for _ in range(2):
            assert differences(drawn(7, late, engine=engine, checkpoint=checkpoint), numbers) == []


def test_another_thread_keeps_its_numbers(way: dict[str, Any]) -> None:
    """Where no layer draws, a recomputation sets no generator back."""
    model = piped(nn.Sequential(nn.Tanh(), linear(), linear(), nn.Tanh()), [2, 2], 3, **way)
    drawn: list[float] = []
    for layer in (model[1], model[2]):
        layer.register_full_backward_hook(lambda *_: drawn.append(torch.rand(()).item()))
    for _ in range(2):
        loss = model(torch.ones(6, 4, requires_grad=True)).sum()
        drawn.append(torch.rand(()).item())
        loss.backward()
    assert len(drawn) == len(set(drawn)) >= 8


def test_numbers_that_another_thread_draws_amid_the_first_pass(way: dict[str, Any]) -> None:
    class Meanwhile(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            thread = threading.Thread(target=torch.rand, args=(5,))
            if torch.is_grad_enabled() is (way["checkpoint"] == "never"):  # in first passes
                thread.start()
                thread.join()
            return F.dropout(x, 0.5)

    x = torch.ones(6, 50, requires_grad=True)
    y = piped(nn.Sequential(Meanwhile(), nn.Identity()), [1, 1], 3, **way)(x)
    notices = way["checkpoint"] != "never" and way["engine"] != "workers"
    with pytest.raises(RuntimeError, match="more or fewer random") if notices else nullcontext():
        y.sum().backward()
        assert x.grad is not None and torch.equal(y, x.grad)


def test_two_backwards_at_once(way: dict[str, Any]) -> None:
    started, go_on = threading.Event(), threading.Event()

    class Waiting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            if not started.is_set():
                started.set()
                assert go_on.wait(60)
            return grad

    class Wait(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = Waiting.apply(x)
            return y

    model = piped(nn.Sequential(Wait(), linear(), linear(), nn.Tanh()), [2, 2], 1, **way)
    model.observer = lambda task: nullcontext()  # each task has a graph of its own then
    weight = model[1].weight
    loss = model(torch.randn(6, 4, requires_grad=True)).square().sum()
    found: list[Tensor] = []

    def gradient() -> Tensor:
        return torch.autograd.grad(loss, weight, retain_graph=True)[0]

    first = threading.Thread(target=lambda: found.append(gradient()), daemon=True)
    first.start()
    assert started.wait(60)
    with pytest.raises(RuntimeError, match="two backwards"):
        gradient()
    go_on.set()
    first.join(60)
    assert torch.equal(found[0], gradient())


class Pause(nn.Module):
    """Let the threads take turns in another order each time."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(1e-3 * random.random())
        return x.sin()


@pytest.mark.parametrize("engine", ["graph", "workers"])  # ranks refuse it
def test_a_parameter_in_two_partitions_gets_the_same_bits_every_time(way: dict[str, Any]) -> None:
    first, second = linear(), linear()
    second.weight = first.weight
    model = piped(nn.Sequential(nn.Sequential(first, Pause()), nn.Sequential(second, Pause())), [1, 1], 7, **way)
    x, found = torch.randn(7, 4), []
    for _ in range(10):
        model.zero_grad()
        model(x).exp().sum().backward()
        assert first.weight.grad is not None
        found.append(first.weight.grad)
    assert all(torch.equal(found[0], grad) for grad in found)


@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_shapes_on_meta(checkpoint: Any, training: bool, deferred: bool) -> None:
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(), nn.Flatten(), nn.Linear(72, 4)
    )
    options = {"chunks": 4, "checkpoint": checkpoint, "deferred_batch_norm": deferred}
    model = GPipe(module, [2, 2, 2], devices=["meta"] * 3, **options).train(training)
    x = torch.randn(13, 3, 5, 5, device="meta", requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert (y.device.type, y.shape) == ("meta", (13, 4))
    assert all(p.grad is not None and p.grad.is_meta and p.grad.shape == p.shape for p in (x, *model.parameters()))


class Frozen(nn.Sequential):
    def train(self, mode: bool = True) -> Frozen:
        return super().train(False)


def test_a_sequence_with_a_method_of_its_own() -> None:
    with pytest.raises(TypeError, match="a method train of its own"):
        piped(Frozen(*layers()), BALANCE, 3)
