"""Contents: a second pass meets what the first pass met, or there is an error; and the present is back after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe.contents import SMALL, Contents, begins_in_place, modules_of
from torchgpipe.stage import Stage

LARGE = SMALL // 4 + 1  # elements


def contents(*layers: nn.Module) -> Contents:
    stage = Stage(3, nn.Sequential(*layers), torch.device("cpu"))
    stage.look()
    return stage.contents(recomputed=True)


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
        buffers: Any = (self.buffer, self.nothing, self.inner._buffers.get("late"))
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


def two_of_one_memory(layer: Any) -> None:
    layer.nothing = layer.buffer.view(-1)
    layer.buffer.add_(1)


@dataclass
class Case:
    """What two first passes do to a layer, what is done to it after them, and the error that this is, if it is one."""

    forward: Callable[[Any], object] = lambda _: None
    after: Callable[[Any], object] = lambda _: None
    size: int = 2
    error: str | None = None


CASES: dict[str, Case] = {
    "another buffer in the passes": Case(forward=another),
    "a buffer that comes in the passes": Case(forward=in_the_free_place),
    "a buffer that is registered in the passes": Case(forward=where_there_was_no_place),
    "a large one that comes in the passes": Case(forward=large_in_the_free_place),
    "a large one that comes in the passes and changes after them": Case(
        large_in_the_free_place,
        lambda layer: layer.nothing.add_(1),
        error="'nothing' of Holds in partition 3 was changed in place between forward and backward",
    ),
    "a buffer that comes after them": Case(after=in_the_free_place),
    "another large one in the passes": Case(another, size=LARGE, error="'buffer' of Holds .* was changed in forward"),
    "two that share memory": Case(two_of_one_memory, error="'buffer' of Holds .* was changed in forward"),
    "a buffer removed": Case(after=lambda layer: delattr(layer, "buffer")),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_second_pass_meets_what_the_first_met(case: Case) -> None:
    layer = Holds(case.forward, case.size)
    held = contents(layer)
    copies: list[Any] = []

    with nullcontext() if case.error is None else pytest.raises(RuntimeError, match=case.error):
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


def test_training_mode_is_as_in_the_first_pass() -> None:
    layer = nn.Dropout()
    held = contents(layer)
    with first_pass(held) as before:
        pass
    layer.eval()
    with held.second_pass(before):
        assert layer.training
    assert not layer.training


def state(layer: nn.Module) -> list[Any]:
    """Return what a layer holds, by identity and, of tensors, by version."""
    tensors = [(name, id(x), x._version) for name, x in (*layer.named_parameters(), *layer.named_buffers())]
    return [*tensors, *((m.training, m.__dict__.get("track_running_stats")) for m in layer.modules())]


class Shifted(nn.BatchNorm1d):
    """A norm whose output depends on its statistics in training, too."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.running_mean is not None
        return x + self.running_mean.mean() + super().forward(x)


def test_a_norm_whose_output_depends_on_its_statistics() -> None:
    x, layer, passes = torch.rand(2, 4, 2, 3), Shifted(2), []
    held = contents(layer)
    for part in x:
        with first_pass(held) as before:
            passes.append((part, layer(part), before))
    present = state(layer)
    for part, first, before in passes[::-1]:
        with pytest.raises(ArithmeticError), held.second_pass(before):
            assert torch.equal(layer(part), first)
            raise ArithmeticError
        assert state(layer) == present


def test_other_layers_get_no_running_statistics_in_a_second_pass() -> None:
    norm = nn.BatchNorm1d(2)
    held = contents(norm)
    with first_pass(held) as before:
        norm(torch.rand(4, 2))
    with held.second_pass(before), pytest.raises(RuntimeError, match="uses the running statistics of a batch norm"):
        norm.running_mean  # noqa: B018


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
def test_whether_a_partition_begins_in_place(partition: nn.Module, expected: bool) -> None:
    assert begins_in_place(partition) == expected


def test_modules() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(nn.Sequential(shared, nn.ReLU()), nn.ModuleDict({"again": shared, "own": nn.Tanh()}))
    model.register_module("none", None)
    assert sorted(map(id, modules_of(model))) == sorted(map(id, model.modules()))
