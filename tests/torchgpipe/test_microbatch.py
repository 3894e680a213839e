"""Micro-batches: what may go in, how it is split, and how outputs come together again."""

from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchgpipe.microbatch import TensorOrTensors, check, gather, scatter

GOOD = {
    "a tensor": torch.zeros(2),
    "a scalar": torch.zeros(()),
    "a tuple of one": (torch.zeros(2),),
    "a tuple": (torch.zeros(2), torch.ones(3, dtype=torch.long)),
}

# Value, and what the message has to say: what was given.
BAD = {
    "a number": (42, "input must be a tensor or a tuple of tensors, but got int"),
    "nothing": (None, "but got NoneType"),
    "a list": ([torch.zeros(2)], "input must be a tensor or a tuple of tensors, but got list"),
    "a dictionary": ({"x": torch.zeros(2)}, "but got dict"),
    "an empty tuple": ((), "but got an empty tuple"),
    "a tuple with a number": ((torch.zeros(2), 1), "input must be a tuple of tensors, but element 1 is int"),
    "a tuple with None": ((None, torch.zeros(2)), "element 0 is NoneType"),
    "a tuple in a tuple": ((torch.zeros(2), (torch.zeros(2),)), "element 1 is tuple"),
}


@pytest.mark.parametrize("value", GOOD.values(), ids=GOOD.keys())
def test_check_accepts(value: object) -> None:
    check(value)


@pytest.mark.parametrize(("value", "message"), BAD.values(), ids=BAD.keys())
def test_check_refuses(value: object, message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        check(value)


def test_check_names_what_it_checks() -> None:
    with pytest.raises(TypeError, match="output of partition 3 must be"):
        check(None, "output of partition 3")


# Batch, chunks, sizes of the micro-batches.
SIZES = [
    (1, 1, [1]),
    (1, 4, [1]),
    (4, 1, [4]),
    (4, 2, [2, 2]),
    (5, 2, [3, 2]),
    (4, 4, [1, 1, 1, 1]),
    (3, 8, [1, 1, 1]),
    (13, 8, [2, 2, 2, 2, 2, 2, 1]),
    (9, 4, [3, 3, 3]),
]


@pytest.mark.parametrize(("batch", "chunks", "sizes"), SIZES, ids=[f"{b} in {c}" for b, c, _ in SIZES])
def test_sizes(batch: int, chunks: int, sizes: list[int]) -> None:
    assert [len(x) for x in scatter(torch.zeros(batch, 2), chunks)] == sizes


@settings(deadline=None)
@given(batch=st.integers(1, 40), chunks=st.integers(1, 50))
def test_scatter_splits_into_equal_parts_and_a_rest(batch: int, chunks: int) -> None:
    x = torch.arange(batch * 3).reshape(batch, 3)
    part = math.ceil(batch / chunks)

    micro_batches = scatter(x, chunks)

    assert len(micro_batches) == math.ceil(batch / part) <= chunks
    for i, micro_batch in enumerate(micro_batches):
        assert isinstance(micro_batch, Tensor)
        assert torch.equal(micro_batch, x[i * part : (i + 1) * part])


@settings(deadline=None)
@given(
    batch=st.integers(1, 20),
    chunks=st.integers(1, 25),
    shapes=st.lists(st.lists(st.integers(0, 3), max_size=2), min_size=1, max_size=3),
    atomic=st.booleans(),
)
def test_gather_undoes_scatter(batch: int, chunks: int, shapes: list[list[int]], atomic: bool) -> None:
    tensors = tuple(torch.rand(batch, *shape) for shape in shapes)
    value: TensorOrTensors = tensors[0] if atomic else tensors

    micro_batches = scatter(value, chunks)
    gathered = gather(micro_batches)

    assert all(type(micro_batch) is type(value) for micro_batch in micro_batches)
    torch.testing.assert_close(gathered, value, rtol=0, atol=0)


def test_a_tuple_is_split_alike() -> None:
    x, y = torch.arange(5), torch.arange(10).reshape(5, 2)

    micro_batches = scatter((x, y), 2)

    assert [[len(t) for t in micro_batch] for micro_batch in micro_batches] == [[3, 3], [2, 2]]
    assert torch.equal(micro_batches[1][0], x[3:])
    assert torch.equal(micro_batches[1][1], y[3:])


@pytest.mark.parametrize("chunks", [1, 4])
def test_an_empty_batch_comes_back_empty(chunks: int) -> None:
    x = torch.zeros(0, 3)

    gathered = gather(scatter(x, chunks))

    assert isinstance(gathered, Tensor)
    assert gathered.shape == x.shape


def test_gradients_go_through() -> None:
    x = torch.rand(5, 2, requires_grad=True)

    y = gather(scatter(x, 3))
    assert isinstance(y, Tensor)
    y.pow(2).sum().backward()  # type: ignore[no-untyped-call]

    assert x.grad is not None
    torch.testing.assert_close(x.grad, 2 * x.detach())


# Value, message.
UNSPLITTABLE = {
    "a scalar": (torch.tensor(1.0), "needs a batch dimension, but tensor 0 is a scalar"),
    "a scalar in a tuple": ((torch.zeros(2), torch.tensor(1.0)), "needs a batch dimension, but tensor 1 is a scalar"),
    "two batch sizes": ((torch.zeros(4, 1), torch.zeros(3, 1)), "one batch size (dimension 0), but they have [4, 3]"),
    "one against many": (
        (torch.zeros(1, 4), torch.zeros(4), torch.zeros(4)),
        "one batch size (dimension 0), but they have [1, 4, 4]",
    ),
}


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize(("value", "message"), UNSPLITTABLE.values(), ids=UNSPLITTABLE.keys())
def test_scatter_refuses(value: TensorOrTensors, message: str, chunks: int) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        scatter(value, chunks)


SCALARS = {
    "alone": torch.tensor(1.0),
    "in a tuple": (torch.zeros(2), torch.tensor(1.0)),
}


@pytest.mark.parametrize("output", SCALARS.values(), ids=SCALARS.keys())
def test_gather_refuses_scalars(output: TensorOrTensors) -> None:
    with pytest.raises(ValueError, match="returned a scalar; move a loss that reduces the batch out of the pipeline"):
        gather([output, output])


@pytest.mark.parametrize("output", SCALARS.values(), ids=SCALARS.keys())
def test_one_output_is_returned_as_it_is(output: TensorOrTensors) -> None:
    assert gather([output]) is output


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([torch.ones(1), (torch.ones(1),)], "micro-batch 0 returned a tensor and micro-batch 1 a tuple of 1"),
        ([(torch.ones(1),), torch.ones(1)], "micro-batch 0 returned a tuple of 1 and micro-batch 1 a tensor"),
        (
            [(torch.ones(1),), (torch.ones(1),), (torch.ones(1), torch.ones(1))],
            "micro-batch 0 returned a tuple of 1 and micro-batch 2 a tuple of 2",
        ),
    ],
)
def test_gather_refuses_outputs_that_differ(outputs: list[TensorOrTensors], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        gather(outputs)


def test_gather_refuses_a_scalar_anywhere() -> None:
    with pytest.raises(ValueError, match="returned a scalar"):
        gather([torch.ones(1), torch.ones(())])
