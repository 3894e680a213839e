"""On CUDA: the peaks that are predicted are those of the allocator, but for what libraries hold."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn

from torchgpipe import GPipe
from torchgpipe.plan.count import count
from torchgpipe.plan.memory import setup_memory
from torchgpipe.plan.predict import Setup

DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = pytest.mark.skipif(DEVICES < 1, reason="needs a CUDA device")
needs_two = pytest.mark.skipif(DEVICES < 2, reason="needs two CUDA devices")


@pytest.mark.parametrize("n", [1, pytest.param(2, marks=needs_two)])
@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_predicted_memory_is_what_is_allocated(n: int, chunks: int, checkpoint: Any) -> None:
    """Within 5 %, of gigabytes: the allocator rounds sizes up, and products may take workspaces for a moment."""
    width, size, balance = 2048, 32768, [8 // n] * n
    module = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(width, width), nn.Tanh())))
    with torch.device("meta"):
        counts = count(copy.deepcopy(module).to("meta"), torch.empty(1, width))
    predicted = setup_memory(counts, Setup(size, tuple(balance), chunks, checkpoint, state=0))

    devices = [torch.device("cuda", j) for j in range(n)]
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    held = [torch.cuda.memory_allocated(d) for d in devices]
    model = GPipe(module, balance, devices=devices, chunks=chunks, checkpoint=checkpoint)
    x = torch.randn(size, width, device=devices[0])
    for _ in range(2):  # predicted is the second step, and every later one
        model.zero_grad()
        for d in devices:
            torch.cuda.synchronize(d)
            torch.cuda.reset_peak_memory_stats(d)
        y = model(x)
        gradient = torch.empty_like(y)
        y.backward(gradient)
        del y, gradient
    for d in devices:
        torch.cuda.synchronize(d)
    peaks = [torch.cuda.max_memory_allocated(d) for d in devices]
    with_workspaces = [torch.cuda.memory_allocated(d) for d in devices]
    torch._C._cuda_clearCublasWorkspaces()
    workspaces = [w - torch.cuda.memory_allocated(d) for w, d in zip(with_workspaces, devices, strict=True)]
    found = [peak - w - h for peak, w, h in zip(peaks, workspaces, held, strict=True)]
    assert found == pytest.approx([device.peak for device in predicted], rel=0.05)
