"""Layers that a straight line through two sizes does not describe are refused or named, and others are not."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from torchgpipe.plan.count.count import count


def test_refuses_layers_that_change_with_the_batch() -> None:
    class Fickle(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if len(x) == 2 else x * 2 + 1

    with pytest.raises(ValueError, match="layer '0' runs different operators"):
        count(nn.Sequential(Fickle()), torch.empty(1, 2))


class Mix(nn.Module):
    """Attend from every sample to every other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ x.T, dim=1) @ x


class Distances(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (x[:, None] - x[None]).abs().sum(1)


@pytest.mark.parametrize(
    ("layers", "named"),
    [([Mix()], "'1':"), ([Distances()], "'1':"), ([Mix(), nn.Tanh(), Distances()], "'1' and 1 more:")],
)
def test_warns_of_layers_that_cost_more_with_every_sample(layers: list[nn.Module], named: str) -> None:
    with pytest.warns(UserWarning, match=f"^layer {named} every further sample costs more") as warned:
        count(nn.Sequential(nn.Linear(8, 8), *layers), torch.empty(1, 8))
    (message,) = [str(warning.message) for warning in warned]
    assert "\n" not in message and warned[0].filename == __file__


@pytest.mark.parametrize(
    ("layers", "shape"),
    [
        ([nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)], (1, 5, 8)),
        ([nn.Embedding(10, 8), nn.Linear(8, 8), nn.Dropout()], (1, 5)),
        ([nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.MaxPool2d(2), nn.Upsample(scale_factor=2)], (1, 3, 9, 9)),
        ([nn.Linear(64, 64), nn.BatchNorm1d(64), nn.GroupNorm(4, 64)], (1, 64)),
    ],
)
def test_does_not_warn_of_others(layers: list[nn.Module], shape: tuple[int, ...]) -> None:
    sample = torch.zeros(shape, dtype=torch.long if isinstance(layers[0], nn.Embedding) else torch.float)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        count(nn.Sequential(*layers), sample)
