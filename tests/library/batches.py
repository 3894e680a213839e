"""Mini-batches, and the running statistics that layers have of them."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.task.batchnorm import DeferredBatchNorm

convert: Callable[..., Any] = DeferredBatchNorm.convert_deferred_batch_norm


def batch(*shape: int, mean: float = 3.0, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a random mini-batch whose samples drift, so that its micro-batches differ in mean and variance."""
    generator = torch.Generator().manual_seed(seed)
    drift = torch.linspace(0.5, 2, shape[0], dtype=torch.float64).reshape(-1, *[1] * (len(shape) - 1))
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * drift + mean * drift).to(dtype)


def statistics(layer: nn.Module) -> list[Tensor]:
    return [x.double() for x in layer.buffers()]


def assert_same_statistics(deferred: nn.Module, plain: nn.Module, **tolerance: Any) -> None:
    tolerance = tolerance or {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(statistics(deferred), statistics(plain), **tolerance)


def run(layer: nn.Module, parts: Iterable[Tensor]) -> Tensor:
    return torch.cat([layer(part) for part in parts])
