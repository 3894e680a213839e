"""What operators are counted as, against what is known by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchgpipe.plan._flops import flop_formula
from torchgpipe.plan.counter import Counter


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
