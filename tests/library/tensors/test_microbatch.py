"""Micro-batches: what may go in, how it is split, and how outputs come together again."""

from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchgpipe.tensors.microbatch import TensorOrTensors, check, gather, scatter, tensors_of

ONE, SCALAR = torch.ones(1), torch.tensor(1.0)

# Value, and what the message has to say: what was given. None where it is accepted.
VALUES: dict[str, tuple[object, str | None]] = {
    "a tensor": (ONE, None),
    "a scalar": (SCALAR, None),
    "a tuple of one": ((ONE,), None),
    "a tuple": ((ONE, torch.ones(3, dtype=torch.long)), None),
    "a number": (42, "output of layer 3 must be a tensor or a tuple of tensors, but got int"),
    "nothing": (None, "but got NoneType"),
    "a list": ([ONE], "must be a tensor or a tuple of tensors, but got list"),
    "an empty tuple": ((), "but got an empty tuple"),
    "a tuple with a number": ((ONE, 1), "output of layer 3 must be a tuple of tensors, but element 1 is int"),
    "a tuple with None": ((None, ONE), "element 0 is NoneType"),
    "a tuple in a tuple": ((ONE, (ONE,)), "element 1 is tuple"),
}


@pytest.mark.parametrize("value, message", VALUES.values(), ids=VALUES)
def test_check(value: object, message: str | None) -> None:
    if message is None:
        check(value)
        return
    with pytest.raises(TypeError, match=re.escape(message)):
        check(value, "output of layer 3")


def test_thirteen_samples_in_eight_chunks_are_seven_micro_batches() -> None:
    assert [len(x) for x in scatter(torch.zeros(13, 2), 8)] == [2, 2, 2, 2, 2, 2, 1]


@given(
    batch=st.integers(1, 40),
    chunks=st.integers(1, 50),
    shapes=st.lists(st.lists(st.integers(0, 3), max_size=2), min_size=1, max_size=3),
    atomic=st.booleans(),
)
def test_scatter_splits_into_equal_parts_and_a_rest_and_gather_undoes_it(
    batch: int, chunks: int, shapes: list[list[int]], atomic: bool
) -> None:
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


UNSPLITTABLE = {
    "a scalar": (SCALAR, "needs a batch dimension, but tensor 0 is a scalar"),
    "a scalar in a tuple": ((ONE, SCALAR), "needs a batch dimension, but tensor 1 is a scalar"),
    "two batch sizes": ((torch.zeros(4, 1), torch.zeros(3, 1)), "one batch size (dimension 0), but they have [4, 3]"),
    "one against many": ((torch.zeros(1, 4), torch.zeros(4)), "one batch size (dimension 0), but they have [1, 4]"),
}


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("value, message", UNSPLITTABLE.values(), ids=UNSPLITTABLE)
def test_scatter_refuses(value: TensorOrTensors, message: str, chunks: int) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        scatter(value, chunks)


@pytest.mark.parametrize("output", [SCALAR, (ONE, SCALAR)], ids=["a scalar", "a scalar in a tuple"])
def test_one_output_is_returned_as_it_is(output: TensorOrTensors) -> None:
    assert gather([output]) is output


LOSS = "returned a scalar; move a loss that reduces the batch out of the pipeline"
# The outputs of several micro-batches, the error, and what it says.
UNLIKE: list[tuple[list[TensorOrTensors], type[Exception], str]] = [
    ([SCALAR, SCALAR], ValueError, LOSS),
    ([(ONE, SCALAR)] * 2, ValueError, LOSS),
    ([ONE, SCALAR], ValueError, LOSS),
    ([ONE, (ONE,)], TypeError, "micro-batch 0 returned a tensor and micro-batch 1 a tuple of 1"),
    ([(ONE,), ONE], TypeError, "micro-batch 0 returned a tuple of 1 and micro-batch 1 a tensor"),
    ([(ONE,), (ONE,), (ONE, ONE)], TypeError, "micro-batch 0 returned a tuple of 1 and micro-batch 2 a tuple of 2"),
]


@pytest.mark.parametrize("outputs, error, message", UNLIKE)
def test_gather_refuses(outputs: list[TensorOrTensors], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        gather(outputs)
