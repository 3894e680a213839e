"""Contents: what is copied, and what a partition begins with. What second passes meet is in tests/behaviours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from torchgpipe.task.contents import Contents, begins_in_place, modules_of
from torchgpipe.task.stage import Stage


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
    """Hold a buffer; in training, change it if told to."""

    def __init__(self, *, changes: bool = False) -> None:
        super().__init__()
        self.register_buffer("buffer", torch.zeros(2))
        self.changes = changes

    def forward(self) -> None:
        if self.changes:
            self.buffer.add_(1)  # type: ignore[operator]


def test_a_copy_is_made_only_where_a_buffer_has_changed() -> None:
    layer, other = Holds(changes=True), Holds()
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
