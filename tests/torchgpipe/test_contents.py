"""Contents: a second pass meets what the first pass met, or there is an error; and the present is back after it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe.batchnorm import DeferredBatchNorm
from torchgpipe.contents import SMALL, Contents, begins_in_place, modules_of

LARGE = SMALL // 4 + 1  # elements


def contents(*layers: nn.Module) -> Contents:
    return Contents(0, nn.Sequential(*layers), threading.RLock(), recomputed=True)


@contextmanager
def first_pass(held: Contents) -> Iterator[Any]:
    before = held.before_first_pass()
    yield before
    held.after_first_pass(before)


class Holds(nn.Module):
    """Hold a buffer, and a place for another; in training, do something to them in forward."""

    def __init__(self, change: Callable[[Any], object] = lambda _: None, size: int = 2) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("buffer", torch.zeros(size))
        self.register_buffer("nothing", None)
        self.change = change
        self.seen: list[list[object]] = []

    def forward(self) -> None:
        buffers = (self.buffer, self.nothing, self.inner._buffers.get("late"))
        self.seen.append([self.training, *(None if b is None else b[:2].tolist() for b in buffers)])
        if self.training:
            self.change(self)


def in_place(layer: Any) -> None:
    layer.buffer.add_(1)


def another(layer: Any) -> None:
    layer.buffer = layer.buffer + 1


def in_the_free_place(layer: Any) -> None:
    layer.nothing = torch.zeros(2) if layer.nothing is None else layer.nothing + 1


def where_there_was_no_place(layer: Any) -> None:
    layer.inner.register_buffer("late", torch.full((2,), float(len(layer.seen))))


def large_in_the_free_place(layer: Any) -> None:
    layer.nothing = torch.zeros(LARGE) if layer.nothing is None else layer.nothing


@dataclass
class Case:
    """What two first passes do to a layer, and what is done to it after them.

    `error`: in which pass that is refused, and what the error says.
    """

    forward: Callable[[Any], object] = lambda _: None
    after: Callable[[Any], object] = lambda _: None
    size: int = 2
    error: tuple[str, str] | None = None


CASES: dict[str, Case] = {
    "nothing": Case(),
    "a buffer in the passes": Case(forward=in_place),
    "another buffer in the passes": Case(forward=another),
    "a buffer that comes in the passes": Case(forward=in_the_free_place),
    "a buffer that is registered in the passes": Case(forward=where_there_was_no_place),
    "a large one that comes in the passes": Case(forward=large_in_the_free_place),
    "a large one that comes in the passes and changes after them": Case(
        large_in_the_free_place, lambda layer: layer.nothing.add_(1), error=("second", "'nothing' of Holds")
    ),
    "a buffer that comes after them": Case(after=in_the_free_place),
    "a buffer after them": Case(after=in_place),
    "another buffer after them": Case(after=another),
    "another large one in the passes": Case(another, size=LARGE, error=("first", "was changed in forward")),
    "training, of one layer": Case(after=lambda layer: layer.inner.eval()),
    "a buffer removed": Case(after=lambda layer: delattr(layer, "buffer")),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_second_pass_meets_what_the_first_met(case: Case) -> None:
    layer = Holds(case.forward, case.size)
    held = Contents(3, layer, threading.RLock(), recomputed=True)
    copies: list[Any] = []

    def passes() -> None:
        for _ in range(2):
            with first_pass(held) as before:
                copies.append(before)
                layer()
        case.after(layer)
        present = state(layer)
        first, layer.seen = layer.seen, []
        for before in copies[::-1]:
            with held.second_pass(before), held.leaves.in_place():
                layer()
            assert state(layer) == present
        assert layer.seen == first[::-1]

    if case.error is None:
        passes()
    else:
        with pytest.raises(RuntimeError, match=f"(?s){case.error[1]}"):
            passes()
        assert len(copies) == (1 if case.error[0] == "first" else 2)


def state(layer: nn.Module) -> list[Any]:
    """Return what a layer holds, by identity and, of tensors, by version."""
    tensors = [(name, id(x), x._version) for name, x in (*layer.named_parameters(), *layer.named_buffers())]
    return [*tensors, *((m.training, m.__dict__.get("track_running_stats")) for m in layer.modules())]


class Shifted(nn.BatchNorm1d):
    """A norm whose output depends on its statistics in training, too."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.running_mean is not None
        return x + self.running_mean.mean() + super().forward(x)


# Layers for inputs of shape (4, 2, 3).
NORMS: dict[str, nn.Module] = {
    "batch norm": nn.BatchNorm1d(2),
    "cumulative": nn.BatchNorm1d(2, momentum=None),
    "nested": nn.Sequential(nn.ReLU(), nn.Sequential(nn.BatchNorm1d(2))),
    "instance norm": nn.InstanceNorm1d(2, track_running_stats=True),
    "without statistics": nn.BatchNorm1d(2, track_running_stats=False),
    "in evaluation": nn.BatchNorm1d(2).eval(),
    "deferred": DeferredBatchNorm(2, chunks=2),
    "with a forward of its own": Shifted(2),
}


@pytest.mark.parametrize("layer", NORMS.values(), ids=NORMS)
def test_running_statistics(layer: nn.Module) -> None:
    x, held, passes = torch.rand(2, 4, 2, 3), contents(layer), []
    for part in x:
        with first_pass(held) as before:
            passes.append((part, layer(part), before))
    present = state(layer)
    for part, first, before in passes[::-1]:
        with pytest.raises(ArithmeticError), held.second_pass(before):
            assert torch.equal(layer(part), first)
            raise ArithmeticError
        assert state(layer) == present


def test_a_copy_is_made_only_where_a_buffer_has_changed() -> None:
    layer, other = Holds(in_place), Holds()
    held = contents(layer, other)
    found = []
    for _ in range(3):
        with first_pass(held) as before:
            found.append(before)
            layer()
    assert len({id(slot.copy) for copies in found for slot in copies if slot.copy is not None}) == 3 + 1


RELU = nn.ReLU(inplace=True)
FIRST: dict[str, tuple[nn.Module, bool]] = {
    "in place": (nn.Sequential(RELU), True),
    "nested": (nn.Sequential(nn.Sequential(nn.Sequential(), nn.Sequential(RELU)), nn.Linear(2, 2)), True),
    "after what passes its input on": (nn.Sequential(nn.Identity(), nn.Flatten(), nn.Dropout(inplace=True)), True),
    "later": (nn.Sequential(nn.Linear(2, 2), RELU), False),
    "in a layer of another kind": (nn.Sequential(nn.ModuleList([RELU])), False),
    "not in place": (nn.Sequential(nn.ReLU()), False),
    "no layer": (nn.Sequential(), False),
}


@pytest.mark.parametrize("partition, expected", FIRST.values(), ids=FIRST)
def test_whether_a_partitionbegins_in_place(partition: nn.Module, expected: bool) -> None:
    assert begins_in_place(partition) == expected


def test_modules() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(nn.Sequential(shared, nn.ReLU()), nn.ModuleDict({"again": shared, "own": nn.Tanh()}))
    model.register_module("none", None)
    found = modules_of(model)
    assert set(found) == set(model.modules())
    assert len(found) == len(set(found))
