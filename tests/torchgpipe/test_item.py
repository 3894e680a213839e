"""Which of a task's outputs share memory, so that they must not be changed in place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torchgpipe.item import shared_by

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
