"""Which engine runs a mini-batch, and that a user cannot tell."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchgpipe.inline
import torchgpipe.workers
from torchgpipe import GPipe


def made(*layers: nn.Module, devices: tuple[str, ...] = ("cpu", "cpu"), **options: Any) -> GPipe:
    balance = [len(layers) - len(devices) + 1, *[1] * (len(devices) - 1)]
    return GPipe(nn.Sequential(*layers), balance, devices=devices, chunks=4, **options)


def chosen(model: GPipe, *inputs: Tensor) -> list[str]:
    """Run the inputs through the model one after another; return the engine that each was given to."""
    names = []
    for x in inputs:
        engine = model._engines.choose([x[i : i + 1] for i in range(0, len(x), max(1, len(x) // 4))])
        names.append(type(engine).__name__.removesuffix("Engine"))
        model(x)
    return names


class Clock(threading.local):
    """Time that only slow layers take, in the thread where they run: a busy machine makes nothing slow."""

    now = 0.0


CLOCK = Clock()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    for engine in (torchgpipe.inline, torchgpipe.workers):
        monkeypatch.setattr(engine, "time", SimpleNamespace(perf_counter=lambda: CLOCK.now))


class Slow(nn.Module):
    """Take a while outside of PyTorch."""

    def forward(self, x: Tensor) -> Tensor:
        CLOCK.now += 0.02
        return x * 2


SMALL, LARGE = torch.ones(4, 8), torch.ones(4, 2**20)

CASES: dict[str, tuple[GPipe, tuple[Tensor, ...], list[str]]] = {
    "one CPU": (made(nn.Tanh(), devices=("cpu",)), (SMALL, SMALL), ["Inline", "Inline"]),
    "meta": (made(nn.Tanh(), nn.Tanh(), devices=("meta", "meta")), (SMALL.to("meta"),) * 2, ["Graph", "Graph"]),
    "mixed": (made(nn.Tanh(), nn.Tanh(), devices=("cpu", "meta")), (SMALL,), ["Graph"]),
    "short tasks": (made(nn.Tanh(), nn.Tanh()), (SMALL,) * 3, ["Inline", "Inline", "Inline"]),
    "many operators": (made(*(nn.Tanh() for _ in range(100))), (SMALL,) * 2, ["Inline", "Workers"]),
    "many elements": (made(nn.Tanh(), nn.Tanh()), (LARGE, LARGE), ["Inline", "Workers"]),
    "many operations": (made(nn.Linear(2000, 2000), nn.Tanh()), (torch.ones(4, 2000),) * 2, ["Inline", "Workers"]),
    "larger micro-batches": (made(nn.Tanh(), nn.Tanh()), (SMALL, SMALL, LARGE), ["Inline", "Inline", "Workers"]),
    "smaller micro-batches": (made(nn.Tanh(), nn.Tanh()), (LARGE, SMALL), ["Inline", "Inline"]),
    "one micro-batch": (made(nn.Tanh(), nn.Tanh()), (SMALL[:1], SMALL[:1]), ["Inline", "Inline"]),
    "slow outside of PyTorch": (made(Slow(), Slow()), (SMALL, SMALL), ["Inline", "Workers"]),
    "asked for workers": (made(nn.Tanh(), nn.Tanh(), engine="workers"), (SMALL,) * 2, ["Workers", "Workers"]),
    "asked for inline": (made(nn.Tanh(), nn.Tanh(), engine="inline"), (LARGE,) * 2, ["Inline", "Inline"]),
    "asked for the graph": (made(nn.Tanh(), nn.Tanh(), engine="graph"), (SMALL,) * 2, ["Graph", "Graph"]),
}


@pytest.mark.parametrize("model, inputs, expected", CASES.values(), ids=CASES)
def test_choice(model: GPipe, inputs: tuple[Tensor, ...], expected: list[str]) -> None:
    assert chosen(model, *inputs) == expected


def test_training_and_evaluation_are_counted_apart() -> None:
    model = made(nn.Tanh(), nn.Tanh())
    assert chosen(model, LARGE, LARGE) == ["Inline", "Workers"]
    model.eval()
    assert chosen(model, LARGE, LARGE) == ["Inline", "Workers"]


def test_training_and_evaluation_are_timed_apart() -> None:
    class SlowInTraining(Slow):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.training else x * 2

    model = made(SlowInTraining(), SlowInTraining())
    assert chosen(model, SMALL, SMALL) == ["Inline", "Workers"]
    model.eval()
    assert chosen(model, SMALL, SMALL) == ["Inline", "Inline"]
    model.train()
    assert chosen(model, SMALL) == ["Workers"]


def test_who_draws_may_be_forgotten_and_how_long_tasks_take_is_not() -> None:
    model = made(nn.Tanh(), nn.Tanh())
    assert chosen(model, LARGE, LARGE) == ["Inline", "Workers"]
    for stage in model._stages:
        stage.draws.clear()
    assert chosen(model, LARGE) == ["Workers"]


def test_a_mini_batch_that_failed_is_counted_again() -> None:
    class Fails(nn.Module):
        now = True

        def forward(self, x: Tensor) -> Tensor:
            if self.now:
                raise ArithmeticError
            return x

    layer = Fails()
    model = made(nn.Tanh(), layer)
    with pytest.raises(ArithmeticError):
        model(LARGE)
    layer.now = False
    assert chosen(model, LARGE, LARGE) == ["Inline", "Workers"]


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_the_first_mini_batch_is_like_the_others(checkpoint: str) -> None:
    """In the first, every task has a generator of its own: same draws, same bits, inline and on workers."""

    def trained(engine: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = made(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 8), nn.Dropout(), engine=engine, checkpoint=checkpoint)
        for p in model.parameters():
            p.grad = None
        outputs = []
        for _ in range(3):
            y = model(SMALL)
            model.zero_grad()
            y.sum().backward()
            outputs += [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        return [*outputs, torch.rand(3)]

    by_auto, by_workers = trained("auto"), trained("workers")
    assert len(by_auto) == 3 * 5 + 1
    assert all(map(torch.equal, by_auto, by_workers))


@pytest.mark.parametrize("requires_grad", [True, False])
def test_layers_that_work_in_place(requires_grad: bool) -> None:
    model = made(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.ReLU(inplace=True), checkpoint="never")
    seen = []
    for _ in range(3):
        model.zero_grad()
        x = torch.linspace(-1, 1, 32).reshape(4, 8).requires_grad_(requires_grad)
        y = model(x)
        y.sum().backward()
        seen.append([x.detach(), y.detach(), x.grad, *(p.grad for p in model.parameters())])
    for tensors in seen[1:]:
        for t, expected in zip(tensors, seen[0], strict=True):
            assert t is expected is None or torch.equal(t, expected)  # type: ignore[arg-type]
