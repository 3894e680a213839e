"""Time of skips across partitions, with pytest-benchmark: with portals, and passed on through every partition.

A step is forward and backward of tiny layers in four partitions on the CPU. Skips go from first to last. Without
portals, their tensors are inputs and outputs of every partition in between. "none": the same layers without skips.
"""

from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.pipelines import ENGINES, on_cpu
from torchgpipe.skip import Namespace, pop, skippable, stash

ROWS = 64


@skippable(stash=["skip"])
class Keep(nn.Module):
    """Pass the input on, and keep it."""

    isolate: Callable[[Namespace], nn.Module]  # set by @skippable

    def forward(self, x: Tensor) -> Generator[stash, None, Tensor]:
        yield stash("skip", x)
        return x


@skippable(pop=["skip"])
class Add(nn.Module):
    """Add what was kept."""

    isolate: Callable[[Namespace], nn.Module]  # set by @skippable

    def forward(self, x: Tensor) -> Generator[pop, Tensor, Tensor]:
        skip = yield pop("skip")
        return x + skip


def layers(skips: int) -> nn.Sequential:
    """Return four partitions of one linear layer each, and `skips` skips from the first to the last."""
    names = [Namespace() for _ in range(skips)]
    return nn.Sequential(
        *(Keep().isolate(name) for name in names),
        *(nn.Linear(8, 8) for _ in range(4)),
        *(Add().isolate(name) for name in names),
    )


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("how", "skips"), [("none", 0), ("portals", 4), ("handed on", 4)], ids=str)
def test_portals(benchmark: Any, how: str, skips: int, engine: str, checkpoint: Any) -> None:
    """Forward and backward of one mini-batch in eight micro-batches."""
    balance = [skips + 1, 1, 1, 1 + skips]
    model = on_cpu(layers(skips), balance, engine, chunks=8, checkpoint=checkpoint, portals=how == "portals")
    x = torch.randn(ROWS, 8, requires_grad=True)

    def step() -> Tensor | None:
        x.grad = None
        y = model(x)
        assert isinstance(y, Tensor)
        y.sum().backward()
        return x.grad

    grad = benchmark.pedantic(step, rounds=30, warmup_rounds=3)
    assert grad is not None and grad.shape == x.shape
