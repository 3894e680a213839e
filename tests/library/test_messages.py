"""Test that common mistakes raise one-line messages that say what to do."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import torchgpipe
from torchgpipe import GPipe

X = torch.zeros(4, 2)


def model() -> GPipe:
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    return GPipe(layers, [1, 1], devices=["cpu", "cpu"], chunks=2)


def tensor_instead_of_criterion() -> object:
    return model().step(X, X, X)  # type: ignore[arg-type]


def no_criterion() -> object:
    return model().step(None, X, X)  # type: ignore[arg-type]


# What was done, and words that the message must have.
MISTAKES: dict[str, tuple[Callable[[], object], list[str]]] = {
    "an array as input": (
        lambda: model()(np.zeros((4, 2), dtype="float32")),
        ["input must be a tensor", "ndarray", "torch.from_numpy()"],
    ),
    "an array as input of a step": (
        lambda: model().step(mse_loss, np.zeros((4, 2), dtype="float32"), X),
        ["input must be a tensor", "torch.from_numpy()"],
    ),
    "no criterion": (no_criterion, ["criterion must be a function", "NoneType", "step(criterion,"]),
    "arguments in another order": (
        tensor_instead_of_criterion,
        ["criterion must be a function", "got Tensor", "step(criterion, input, target)"],
    ),
    "a shape as sample": (
        lambda: torchgpipe.sequential(nn.Linear(64, 64), (8, 64)),
        ["sample must have the tensors that Linear is called with", "torch.zeros(8, 64)"],
    ),
    "too few partitions for a V": (
        lambda: GPipe(
            nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
            [1, 1],
            devices=["cpu", "cpu"],
            schedule="ZBVZeroBubble",
        ),
        ["ZBVZeroBubble needs", "at least 2, on each device", "a balance of 4 partitions"],
    ),
    "too few devices": (
        lambda: GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], devices=["cpu"]),
        ["too few devices: 2 partitions, but 1 devices", "at most 1 partitions"],
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake(name: str) -> None:
    make, words = MISTAKES[name]
    with pytest.raises((TypeError, ValueError, IndexError)) as caught:
        make()
    message = str(caught.value)
    assert "\n" not in message
    assert [word for word in words if word not in message] == []


def test_a_target_on_another_device_is_named() -> None:
    target: Tensor = X.to("meta")
    with pytest.raises(RuntimeError) as caught:
        model().step(mse_loss, X, target)
    notes = getattr(
        caught.value, "__notes__", ["before Python 3.11, errors have no notes: on meta"]
    )
    assert any("on meta" in note for note in notes)
