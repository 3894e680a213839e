"""On CUDA: the peaks that are predicted are those of the allocator, but for what libraries hold."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torchgpipe import GPipe
from torchgpipe.plan.count import count
from torchgpipe.plan.memory import setup_memory
from torchgpipe.plan.optimizer import OPTIMIZERS, optimizer_named
from torchgpipe.plan.predict import Setup

from .cuda import needs_cuda, needs_two

WIDTH = 2048
pytestmark = needs_cuda


@pytest.mark.parametrize("n", [1, pytest.param(2, marks=needs_two)])
@pytest.mark.parametrize("chunks", [1, 4])
def test_predicted_memory_is_what_is_allocated(n: int, chunks: int, checkpoint: Any) -> None:
    """Within 5 %, of gigabytes: the allocator rounds sizes up, and products may take workspaces for a moment."""
    setup = Setup(32768, (8 // n,) * n, chunks, checkpoint)
    assert allocated(module(), setup) == pytest.approx(predicted(module(), setup), rel=0.05)


@pytest.mark.parametrize("n", [1, pytest.param(2, marks=needs_two)])
@pytest.mark.parametrize("name", ["momentum", "rmsprop", "adagrad", "adam", "adamw"])
def test_predicted_memory_of_the_optimizers_step(n: int, name: str) -> None:
    """With few activations it is the peak: by default, all parameters are updated at once."""
    setup = Setup(64, (8 // n,) * n, 2, "always", optimizer_named(name, foreach=True))
    make = OPTIMIZERS[name]
    assert make is not None
    assert allocated(module(), setup, make) == pytest.approx(predicted(module(), setup), rel=0.05)


def module() -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def predicted(module: nn.Sequential, setup: Setup) -> list[float]:
    with torch.device("meta"):
        counts = count(module.to("meta"), torch.empty(1, WIDTH))
    return [device.peak for device in setup_memory(counts, setup)]


def allocated(
    module: nn.Sequential, setup: Setup, make: Callable[..., torch.optim.Optimizer] | None = None
) -> list[int]:
    """Return each device's peak in the second step, beside workspaces."""
    devices = [torch.device("cuda", j) for j in range(len(setup.balance))]
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    held = [torch.cuda.memory_allocated(d) for d in devices]
    model = GPipe(module, setup.balance, devices=devices, chunks=setup.chunks, checkpoint=setup.checkpoint)
    optimizer = None if make is None else make(model.parameters(), lr=0.1)
    x = torch.randn(setup.batch_size, WIDTH, device=devices[0])
    for _ in range(2):  # predicted is the second step, and every later one
        model.zero_grad()
        for d in devices:
            torch.cuda.synchronize(d)
            torch.cuda.reset_peak_memory_stats(d)
        y = model(x)
        gradient = torch.empty_like(y)
        y.backward(gradient)
        del gradient
        if optimizer is not None:
            optimizer.step()
        del y
    for d in devices:
        torch.cuda.synchronize(d)
    peaks = [torch.cuda.max_memory_allocated(d) for d in devices]
    with_workspaces = [torch.cuda.memory_allocated(d) for d in devices]
    torch._C._cuda_clearCublasWorkspaces()
    workspaces = [w - torch.cuda.memory_allocated(d) for w, d in zip(with_workspaces, devices, strict=True)]
    return [peak - w - h for peak, w, h in zip(peaks, workspaces, held, strict=True)]
