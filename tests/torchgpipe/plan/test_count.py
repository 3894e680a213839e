"""Counts against what is known by hand, and the line through two sizes against counting at a third."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.models import unet
from torchgpipe.plan._flops import flop_formula
from torchgpipe.plan.count import Counts, count
from torchgpipe.plan.operators import Counter


@pytest.mark.parametrize(
    ("layer", "shape", "kind", "flops"),
    [
        (nn.Linear(8, 16), (5, 8), "matmul", 2 * 5 * 8 * 16),
        (nn.Conv2d(3, 4, 3, padding=1), (2, 3, 8, 8), "conv3x3", 2 * 2 * 8 * 8 * 3 * 4 * 9),
        (nn.Conv2d(3, 4, 3, stride=2), (2, 3, 9, 9), "conv", 2 * 2 * 4 * 4 * 3 * 4 * 9),
        (nn.Conv2d(3, 4, 1), (2, 3, 8, 8), "conv", 2 * 2 * 8 * 8 * 3 * 4),
        (nn.BatchNorm2d(3, track_running_stats=False), (2, 3, 8, 8), "norm", 0),
        (nn.AvgPool2d(2), (2, 3, 8, 8), "pool", 0),
        (nn.ReLU(), (2, 3), "elementwise", 0),
    ],
)
def test_operators(layer: nn.Module, shape: tuple[int, ...], kind: str, flops: int) -> None:
    layer, x = layer.to("meta"), torch.empty(shape, device="meta")
    with Counter() as counter:
        layer(x)
    assert [(o.kind, o.flops) for o in counter.operators] == [(kind, flops)]


def test_views_are_nothing() -> None:
    with Counter() as counter:
        torch.empty(4, 6, device="meta").view(24).unsqueeze(0).t().detach()
    assert counter.operators == []


def test_bytes_are_read_and_written() -> None:
    with Counter() as counter:
        torch.empty(4, 6, device="meta") + torch.empty(6, device="meta")
    assert counter.operators[0].bytes == 4 * (24 + 6 + 24)


def test_pytorch_has_its_formulas() -> None:
    assert flop_formula(torch.ops.aten.mm.default) is not None, "torch.utils.flop_counter.flop_registry has moved"
    assert flop_formula(torch.ops.aten.relu.default) is None


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


def test_refuses_layers_that_change_with_the_batch() -> None:
    class Fickle(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if len(x) == 2 else x * 2 + 1

    with pytest.raises(ValueError, match="layer '0' runs different operators"):
        count(nn.Sequential(Fickle()), torch.empty(1, 2))


def test_leaves_the_model_alone() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert isinstance(count(model, torch.rand(4, 3)), Counts)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
