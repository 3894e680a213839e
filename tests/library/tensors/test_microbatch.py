"""Micro-batches: allowed inputs and outputs. Splitting is tested in tests/behaviours."""

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch

from torchgpipe.tensors.microbatch import TensorOrTensors, check, gather, scatter

ONE, SCALAR = torch.ones(1), torch.tensor(1.0)


@pytest.mark.parametrize("output", [SCALAR, (ONE, SCALAR)], ids=["a scalar", "a scalar in a tuple"])
def test_one_output_is_returned_as_it_is(output: TensorOrTensors) -> None:
    check(output)
    assert gather([output]) is output


checking: Callable[[object], object] = partial(check, what="output of layer 3")
splitting: Callable[[TensorOrTensors], object] = partial(scatter, chunks=2)
LOSS = "returned a scalar; move a loss that reduces the batch out of the pipeline"

# The function, its argument, the error's type, its message.
REFUSED: list[tuple[Callable[..., object], object, type[Exception], str]] = [
    (checking, 42, TypeError, "output of layer 3 must be a tensor or a tuple of tensors, but got int"),
    (checking, (), TypeError, "but got an empty tuple"),
    (checking, (ONE, 1), TypeError, "output of layer 3 must be a tuple of tensors, but element 1 is int"),
    (partial(scatter, chunks=1), SCALAR, ValueError, "needs a batch dimension, but tensor 0 is a scalar"),
    (splitting, (ONE, SCALAR), ValueError, "needs a batch dimension, but tensor 1 is a scalar"),
    (splitting, (torch.zeros(1, 4), torch.zeros(4)), ValueError, "one batch size (dimension 0), but they have [1, 4]"),
    (gather, [(ONE, SCALAR)] * 2, ValueError, LOSS),
    (gather, [ONE, SCALAR], ValueError, LOSS),
    (gather, [ONE, (ONE,)], TypeError, "micro-batch 0 returned a tensor and micro-batch 1 a tuple of 1"),
]


@pytest.mark.parametrize("do, given, error, message", REFUSED)
def test_refused(do: Callable[..., object], given: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        do(given)
