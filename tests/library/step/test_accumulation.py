"""Test that gradients add up over several steps, as if one step had all the samples."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from torchgpipe import GPipe

X = torch.randn(12, 6)
TARGET = torch.randint(5, (12,))


def pipeline(schedule: str) -> GPipe:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
    return GPipe(layers, [2, 1], devices=["cpu", "cpu"], chunks=2, schedule=schedule)


def gradients(model: GPipe) -> list[Tensor]:
    """Return the gradients of the pipeline's four parameters, and fail if one is missing."""
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(found) == 4
    return found


def gradients_of_one_step(schedule: str) -> list[Tensor]:
    model = pipeline(schedule)
    model.step(cross_entropy, X, TARGET)
    return gradients(model)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_steps_of_one_size_divide_the_loss(schedule: str) -> None:
    model, steps = pipeline(schedule), 3

    def part(output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output, target) / steps

    for x, target in zip(X.chunk(steps), TARGET.chunk(steps), strict=True):
        model.step(part, x, target)
    # The gradients were added up in another order.
    torch.testing.assert_close(gradients(model), gradients_of_one_step(schedule))


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_steps_of_other_sizes_add_and_divide_gradients(schedule: str) -> None:
    model, sizes = pipeline(schedule), [5, 1, 6]

    def total(output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output, target, reduction="sum")

    for x, target in zip(X.split(sizes), TARGET.split(sizes), strict=True):
        model.step(total, x, target, reduction="sum")
    means = [gradient / len(X) for gradient in gradients(model)]
    torch.testing.assert_close(means, gradients_of_one_step(schedule))
