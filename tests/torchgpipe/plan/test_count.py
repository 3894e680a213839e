"""Counts against what is known by hand, and the line through two sizes against counting at a third."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from reproduce.models import unet
from torchgpipe.plan.count import Counts, count


def test_layers_of_unet() -> None:
    model = unet(2, 1, 4)
    counts = count(model, torch.empty(1, 3, 16, 16))
    layers = counts.at(3)
    assert [layer.name for layer in layers] == list(model._modules)
    assert [layer.parameters for layer in layers] == [sum(p.nbytes for p in layer.parameters()) for layer in model]
    assert sorted(s.skip for layer in layers for s in layer.stashes) == [0, 1]
    assert sorted(skip for layer in layers for skip in layer.pops) == [0, 1]
    assert counts.input == 3 * 16 * 16 * 4
    assert layers[0].output == 3 * 4 * 16 * 16 * 4


@pytest.mark.parametrize("size", [1, 3, 16])
def test_the_line_through_two_sizes(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
    x = torch.empty(1, 3, 8, 8)
    line = count(model, x).at(size)
    monkeypatch.setattr("torchgpipe.plan.count.SIZES", (size, size + 1))
    assert line == count(model, x).at(size)


class Copied(nn.Linear):
    copies = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Copied:
        Copied.copies += 1
        return Copied(self.in_features, self.out_features, device=self.weight.device)


@pytest.mark.parametrize(("widths", "different"), [([8] * 41, 1), ([8, 4] * 20 + [8], 2)])
def test_layers_that_behave_alike_are_copied_once(
    widths: list[int], different: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Copied, "copies", 0)
    model = nn.Sequential(*(Copied(a, b) for a, b in pairwise(widths)))
    assert len(count(model, torch.empty(1, 8), memory=False)) == 40
    assert Copied.copies == 2 * (different + 1)  # for two sizes; to the model's input goes no gradient


def test_leaves_the_model_alone() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert isinstance(count(model, torch.rand(4, 3)), Counts)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
