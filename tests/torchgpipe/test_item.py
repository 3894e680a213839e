"""Tensors that share memory: which of a task's outputs do, and that changing one of them in place is refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from torchgpipe.item import check_unchanged, shared_by, versions

Tensors = tuple[Tensor | None, ...]

x, y = torch.ones(2, 3), torch.ones(2, 3)
sparse = torch.eye(3).to_sparse()

# Outputs, inputs, which inputs share memory with others; and which outputs do.
CASES: dict[str, tuple[Tensors, Tensors, tuple[bool, ...], tuple[bool, ...]]] = {
    "one": ((x,), (), (), (False,)),
    "nothing": ((None, None), (), (), (False, False)),
    "two": ((x, y), (), (), (False, False)),
    "one twice": ((x, y, x), (), (), (True, False, True)),
    "a view": ((x, x.view(6)), (), (), (True, True)),
    "two parts": ((x[:1], x[1:]), (), (), (True, True)),
    "detached": ((x, x.detach(), None), (), (), (True, True, False)),
    "a copy": ((x, x.clone()), (), (), (False, False)),
    "sparse": ((sparse, sparse, x), (), (), (True, True, False)),
    "an input": ((x,), (x, y), (False, False), (False,)),
    "a shared input": ((x,), (x, y), (True, False), (True,)),
    "a view of a shared input": ((y, x.t()), (x, y), (True, False), (False, True)),
    "another input": ((y,), (x, y), (True, False), (False,)),
    "a skip that is not there": ((x,), (x, None), (True, False), (True,)),
}


@pytest.mark.parametrize("outputs, inputs, shared, expected", CASES.values(), ids=CASES)
def test_shared(outputs: Tensors, inputs: Tensors, shared: tuple[bool, ...], expected: tuple[bool, ...]) -> None:
    assert shared_by(outputs, inputs, shared) == expected


# What is done to two inputs, of which the first shares memory with something else; whether it is refused.
CHANGES: dict[str, tuple[Callable[[Tensor, Tensor], object], bool]] = {
    "nothing": (lambda x, y: x + y, False),
    "the shared one": (lambda x, y: x.add_(1), True),
    "a part of it": (lambda x, y: x[:1].zero_(), True),
    "the other": (lambda x, y: y.add_(x), False),
}


@pytest.mark.parametrize("change, refused", CHANGES.values(), ids=CHANGES)
def test_changes(change: Callable[[Tensor, Tensor], object], refused: bool) -> None:
    inputs = torch.ones(2), torch.ones(2)
    before = versions((*inputs, None))
    change(*inputs)
    message = "partition 3 changed an input in place that shares memory.*inplace=False.*x.clone()"
    with pytest.raises(RuntimeError, match=message) if refused else nullcontext():
        check_unchanged(3, before, (*inputs, None), (True, False, False))


def test_changes_that_are_not_counted_pass() -> None:
    # Nothing goes backward through what inference mode makes.
    with torch.inference_mode():
        z = torch.ones(2)
        before = versions((z,))
        z.add_(1)
        check_unchanged(0, before, (z,), (True,))
