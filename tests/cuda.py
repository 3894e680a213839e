"""CUDA devices for tests, and layers to put on them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from .parts import Pop, Stash

DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0
needs_cuda = pytest.mark.skipif(DEVICES < 1, reason="needs a CUDA device")
needs_two = pytest.mark.skipif(DEVICES < 2, reason="needs two CUDA devices")

ON_GPUS = [
    pytest.param(["cuda:0"], id="1 on one"),
    pytest.param(["cuda:0"] * 2, id="2 on one"),
    pytest.param(["cuda:0"] * 4, id="4 on one"),
    pytest.param(["cuda:0", "cuda:1"], id="2 on two", marks=needs_two),
    pytest.param(["cuda:0", "cuda:1", "cuda:0", "cuda:1"], id="4 on two, in turn", marks=needs_two),
]
# With the host as a second device, so that tensors cross, and streams wait, also where there is one GPU.
PLACES = [
    *ON_GPUS,
    pytest.param(["cpu", "cuda:0"], id="from the host"),
    pytest.param(["cuda:0", "cpu"], id="to the host"),
    pytest.param(["cuda:0", "cpu", "cuda:0", "cpu"], id="to the host and back"),
]
everywhere = pytest.mark.parametrize("devices", PLACES)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32), Stash(), nn.Linear(32, 32), nn.Tanh(), nn.LayerNorm(32), Pop(), nn.Linear(32, 32), nn.ReLU()
    )


def balance(devices: list[str]) -> list[int]:
    return [8 // len(devices)] * len(devices)
