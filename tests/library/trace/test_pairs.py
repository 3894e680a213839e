"""Test modules that return a value for each pair of samples, such as an image and a text."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, arange, nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from torchgpipe import GPipe, sequential
from torchgpipe.trace.refuse import Untraceable

from ...behaviours.test_every_schedule import CHUNKS, every_schedule, pipeline

GIVEN = torch.linspace(-1, 1, 80).view(2, 8, 5).sin().unbind()


class Matching(nn.Module):
    """Compare each image with each text."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 4))
        self.text = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, images: Tensor, texts: Tensor) -> Any:
        scores = self.image(images) @ self.text(texts).t()
        return scores, scores.t()


class Ranking(Matching):
    """Score each image for each text, relative to its scores for all other texts of the batch."""

    def forward(self, images: Tensor, texts: Tensor) -> Any:
        scores, _ = super().forward(images, texts)
        return scores.softmax(1)


def contrast(output: Any, _: object) -> Tensor:
    by_image, by_text = output
    own = arange(len(by_image))
    return cross_entropy(by_image, own) + cross_entropy(by_text, own)


def layers_of(module: nn.Module, samples: int = 8) -> nn.Sequential:
    with pytest.warns(UserWarning, match="Matching returns a value for each pair of samples"):
        return sequential(module, tuple(x[:samples] for x in GIVEN))


@every_schedule
def test_step(schedule: str, engine: str) -> None:
    """Check that a step pairs each sample only with the samples of its own micro-batch."""
    module = Matching()
    plain = copy.deepcopy(module)
    model = pipeline(layers_of(module), schedule, engine=engine)
    loss = model.step(contrast, GIVEN, None)

    micro_batches = zip(*[x.chunk(CHUNKS) for x in GIVEN], strict=True)
    losses = [contrast(plain(*x), None) / CHUNKS for x in micro_batches]
    expected = torch.stack(losses).sum()
    expected.backward()
    assert_close(loss, expected.detach())
    grads = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        assert_close(grads[name].grad, parameter.grad)


@pytest.mark.parametrize("samples", [8, 7])
def test_outputs_are_not_concatenated(samples: int) -> None:
    """Check that the output of several micro-batches is refused, because pairs would be missing.

    With one micro-batch, the output must be that of the module.
    """
    module = Matching()
    layers = layers_of(module, samples)
    model = GPipe(layers, [2, 2], devices=["cpu", "cpu"])
    assert_close(model(*GIVEN), module(*GIVEN))
    model.chunks = 2
    with pytest.raises(ValueError, match="return the inputs of the comparison"):
        model(*GIVEN)


@pytest.mark.parametrize("samples", [8, 7])
def test_values_that_depend_on_other_samples(samples: int) -> None:
    with pytest.raises(Untraceable, match="other outputs for the two halves of the sample"):
        sequential(Ranking(), tuple(x[:samples] for x in GIVEN))
