"""Micro-batches: what may go in, how it is split, how outputs come together again, and which are checkpointed."""

import math
import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchgpipe.tensors.checkpoint import MODES, checkpointed
from torchgpipe.tensors.microbatch import TensorOrTensors, check, gather, scatter, tensors_of

ONE, SCALAR = torch.ones(1), torch.tensor(1.0)


def test_how_many_micro_batches_are_checkpointed() -> None:
    assert {mode: (checkpointed(mode, 1), checkpointed(mode, 4)) for mode in MODES} == {
        "always": (1, 4),
        "except_last": (0, 3),
        "never": (0, 0),
    }


@given(
    batch=st.integers(1, 40),
    chunks=st.integers(1, 50),
    shapes=st.lists(st.lists(st.integers(0, 3), max_size=2), min_size=1, max_size=3),
    atomic=st.booleans(),
)
def test_scatter_splits_into_equal_parts_and_a_rest_and_gather_undoes_it(
    batch: int, chunks: int, shapes: list[list[int]], atomic: bool
) -> None:
    """Thirteen samples in eight chunks are seven micro-batches."""
    tensors = tuple(torch.rand(batch, *shape) for shape in shapes)
    value: TensorOrTensors = tensors[0] if atomic else tensors
    size = math.ceil(batch / chunks)

    micro_batches = scatter(value, chunks)

    assert len(micro_batches) == math.ceil(batch / size) <= chunks
    for i, micro_batch in enumerate(micro_batches):
        assert type(micro_batch) is type(value)
        for part, x in zip(tensors_of(micro_batch), tensors_of(value), strict=True):
            assert torch.equal(part, x[i * size : (i + 1) * size])
    torch.testing.assert_close(gather(micro_batches), value, rtol=0, atol=0)


@pytest.mark.parametrize("output", [SCALAR, (ONE, SCALAR)], ids=["a scalar", "a scalar in a tuple"])
def test_one_output_is_returned_as_it_is(output: TensorOrTensors) -> None:
    check(output)
    assert gather([output]) is output


checking: Callable[[object], object] = partial(check, what="output of layer 3")
splitting: Callable[[TensorOrTensors], object] = partial(scatter, chunks=2)
LOSS = "returned a scalar; move a loss that reduces the batch out of the pipeline"

# What is done with what, the error, and what it says.
REFUSED: list[tuple[Callable[..., object], object, type[Exception], str]] = [
    (checking, 42, TypeError, "output of layer 3 must be a tensor or a tuple of tensors, but got int"),
    (checking, [ONE], TypeError, "must be a tensor or a tuple of tensors, but got list"),
    (checking, (), TypeError, "but got an empty tuple"),
    (checking, (ONE, 1), TypeError, "output of layer 3 must be a tuple of tensors, but element 1 is int"),
    (partial(scatter, chunks=1), SCALAR, ValueError, "needs a batch dimension, but tensor 0 is a scalar"),
    (splitting, (ONE, SCALAR), ValueError, "needs a batch dimension, but tensor 1 is a scalar"),
    (splitting, (torch.zeros(1, 4), torch.zeros(4)), ValueError, "one batch size (dimension 0), but they have [1, 4]"),
    (gather, [(ONE, SCALAR)] * 2, ValueError, LOSS),
    (gather, [ONE, SCALAR], ValueError, LOSS),
    (gather, [ONE, (ONE,)], TypeError, "micro-batch 0 returned a tensor and micro-batch 1 a tuple of 1"),
    (gather, [(ONE,), (ONE,), (ONE, ONE)], TypeError, "a tuple of 1 and micro-batch 2 a tuple of 2"),
]


@pytest.mark.parametrize("do, given, error, message", REFUSED)
def test_refused(do: Callable[..., object], given: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        do(given)
