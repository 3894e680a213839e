"""What operators are counted as, against what is known by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from torchgpipe.plan.count.counter import Counter
from torchgpipe.plan.hardware._flops import flop_formula


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


TABLE, ROWS = torch.empty(1000, 8, device="meta"), torch.empty(3, dtype=torch.int64, device="meta")
LOOKED_UP = 2 * 4 * 3 * 8 + 8 * 3
"""Three rows of the table are read and written, and three numbers of rows read."""


@pytest.mark.parametrize(
    ("run", "nbytes"),
    [
        (lambda: torch.nn.functional.embedding(ROWS, TABLE), LOOKED_UP),
        (lambda: TABLE.index_select(0, ROWS), LOOKED_UP),
        (lambda: TABLE[ROWS], LOOKED_UP),
        (lambda: TABLE.gather(0, ROWS.reshape(1, 3)), 2 * 4 * 3 + 8 * 3),
        (lambda: ROWS.index_select(0, torch.empty(9, dtype=torch.int64, device="meta")), 8 * (3 + 9 + 9)),
        (lambda: torch.empty(4, 6, device="meta").fill_(1), 4 * 24),
        (lambda: torch.empty(4, 6, device="meta").zero_(), 4 * 24),
        (lambda: torch.empty(4, 6, device="meta").copy_(torch.empty(6, device="meta")), 4 * (6 + 24)),
        (lambda: torch.empty(4, 6, device="meta").add_(1), 2 * 4 * 24),
    ],
)
def test_bytes_of_lookups_and_of_what_is_overwritten(run: Callable[[], object], nbytes: int) -> None:
    with Counter() as counter:
        run()
    assert [o.bytes for o in counter.operators] == [nbytes]


def test_pytorch_has_its_formulas() -> None:
    assert flop_formula(torch.ops.aten.mm.default) is not None, "torch.utils.flop_counter.flop_registry has moved"
    assert flop_formula(torch.ops.aten.relu.default) is None
