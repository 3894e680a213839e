"""Running statistics: deferred batch norm keeps those of whole mini-batches, plain batch norm does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from reproduce.run.accuracy.running_statistics import WholeBatchStatistics
from torchgpipe import GPipe


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5))


def train(model: nn.Module, watch: WholeBatchStatistics, steps: int = 3) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        model(torch.randn(8, 3, 8, 8, generator=generator)).square().mean().backward()
        watch.end_mini_batch()


@pytest.mark.parametrize("deferred", [True, False])
def test_only_deferred_statistics_are_those_of_mini_batches(way: dict[str, Any], deferred: bool) -> None:
    model = GPipe(layers(), [2, 3], devices=["cpu", "cpu"], chunks=4, deferred_batch_norm=deferred, **way)
    watch = WholeBatchStatistics(model)
    train(model, watch)
    difference = watch.close()
    assert difference < 1e-5 if deferred else difference > 1e-2


def test_a_plain_model_differs_by_nothing_much_and_looking_changes_nothing() -> None:
    model, other = layers(), layers()
    watch, blind = WholeBatchStatistics(model), WholeBatchStatistics(nn.Sequential())
    train(model, watch)
    train(other, blind)
    model.eval()
    model(torch.randn(2, 3, 8, 8))
    assert not any(layer.seen for layer in watch.layers), "an evaluation is not seen"
    assert watch.close() < 1e-6 and blind.close() == 0
    for one, two in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert one.equal(two)
    model.train()(torch.randn(2, 3, 8, 8))
    assert not any(layer.seen for layer in watch.layers), "nobody looks any more"
