"""Test how `step` splits targets into micro-batches, and its use of graphs of other networks.

Targets and criteria may have tensors that another network computes. More criteria are tested in
tests/behaviours/test_every_schedule.py, with every engine and schedule.
"""

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from torchgpipe import GPipe
from torchgpipe.step.targets import parted

Criterion = Callable[[Tensor, Tensor], Tensor]
SCHEDULES = ["GPipe", "1F1B", "ZBH1", "ZBVZeroBubble"]


@dataclass
class Boxes:
    corners: Tensor
    unit: str = "pixels"


@pytest.mark.parametrize("sizes", [[2, 1], [3]])
def test_any_mapping_a_dataclass_and_arrays_are_parted(sizes: list[int]) -> None:
    x = torch.arange(3)
    target = UserDict({"mask": x.numpy(), "boxes": Boxes(x * 2)})
    parts = parted(target, sizes)
    assert [type(part) for part in parts] == [UserDict] * len(sizes)
    assert torch.cat([part["mask"] for part in parts]).equal(x)
    assert torch.cat([part["boxes"].corners for part in parts]).equal(x * 2)
    assert {part["boxes"].unit for part in parts} == {"pixels"}


def test_a_list_with_an_entry_for_each_sample_is_parted_by_entries() -> None:
    """Check that a list of three images, one for each sample, is split into two and one.

    Each image has three boxes, so the tensors inside also have the length 3. Nevertheless, the list
    itself must be split.
    """
    images = [{"boxes": torch.full((3, 4), float(i))} for i in range(3)]
    first, last = parted(images, [2, 1])
    assert first == images[:2] and last == images[2:]
    columns = [torch.arange(3), torch.arange(3.0)]
    assert [part[1].tolist() for part in parted(columns, [2, 1])] == [[0.0, 1.0], [2.0]]


def test_a_list_of_tensors_of_the_batch_size_is_parted_as_a_tuple_is() -> None:
    """Check that the tensors in a list are split, and not the list itself.

    If a list has as many tensors as there are samples, it could be split in both ways, and is
    refused.
    """
    x = torch.arange(2)
    for other in (None, 0.1):
        first, last = parted([x, other], [1, 1])
        assert first[0].tolist() == [0] and last[0].tolist() == [1]
    y = torch.arange(3)
    first, last = parted([y, y + 3], [2, 1])
    assert [part.tolist() for part in first + last] == [[0, 1], [3, 4], [2], [5]]
    with pytest.raises(ValueError, match="can be split in two ways; if each"):
        parted([x, x + 2], [1, 1])
    pair = ({"part": x}, {"part": x + 2})
    with pytest.raises(ValueError, match=r"the first is a dict\) for 2 samples, and each of their"):
        parted(pair, [1, 1])
    # The length of one tensor shows that each dictionary belongs to a sample.
    first, last = parted(({"part": x}, {"part": y}), [1, 1])
    assert [first[0]["part"].tolist(), last[0]["part"].tolist()] == [[0, 1], [0, 1, 2]]
    weights = [0.5, 1.0]  # of classes
    assert parted((x, weights), [1, 1])[1][1] == weights
    names = np.array(["a", "b"])
    assert [part[1].tolist() for part in parted((x, names), [1, 1])] == [["a"], ["b"]]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 5))


def pipeline(module: nn.Sequential, schedule: str, engine: Any) -> GPipe:
    balance = [1, 1, 1, 1] if schedule == "ZBVZeroBubble" else [2, 2]
    devices = ["cpu", "cpu"]
    return GPipe(module, balance, devices=devices, chunks=4, schedule=schedule, engine=engine)


def assert_gradients_are_close(parameters: list[nn.Parameter], expected: list[Tensor]) -> None:
    for p, grad in zip(parameters, expected, strict=True):
        assert p.grad is not None
        # The gradients were added up in another order.
        torch.testing.assert_close(p.grad, grad)


@pytest.mark.parametrize("engine", ["workers", "graph"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_target_may_have_a_graph_which_goes_backward_once(schedule: str, engine: str) -> None:
    """Check that the loss also trains another network which computes the targets."""
    module, tower = layers(), nn.Linear(6, 5)
    parameters = [*module.parameters(), *tower.parameters()]
    x = torch.randn(8, 6)
    expected = torch.autograd.grad(mse_loss(module(x), tower(x)), parameters)
    calls: list[Tensor] = []
    tower.weight.register_hook(calls.append)

    def criterion(output: Tensor, target: dict[str, Tensor]) -> Tensor:
        return mse_loss(output, target["other tower"])

    pipeline(module, schedule, engine).step(criterion, x, {"other tower": tower(x)})
    assert_gradients_are_close(parameters, list(expected))
    assert len(calls) == 1


@pytest.mark.parametrize("engine", ["workers", "graph"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_criterion_may_close_over_a_tensor_with_a_graph(schedule: str, engine: str) -> None:
    """Check a criterion with class weights that are computed by autograd from a parameter.

    Each step frees the graph of the weights. Therefore each step computes new weights.
    """
    module, learned = layers(), nn.Parameter(torch.randn(5))
    parameters = [*module.parameters(), learned]
    x, target = torch.randn(8, 6), torch.randn(8, 5)

    def weighted() -> Criterion:
        weights = learned.softmax(0)
        return lambda output, target: mse_loss(output * weights, target)

    expected = torch.autograd.grad(weighted()(module(x), target), parameters)
    criterion = weighted()
    model = pipeline(module, schedule, engine)
    model.step(criterion, x, target)
    assert_gradients_are_close(parameters, list(expected))
    with pytest.raises(RuntimeError, match="a second time"):
        model.step(criterion, x, target)
