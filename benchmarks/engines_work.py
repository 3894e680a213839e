"""What `benchmarks.engines` trains: works of two partitions, which processes make by name."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from reproduce.models import amoebanetd
from reproduce.run.engines import Work

BATCH = 16
MESSAGES = {"2 KB": 2**11, "1 MB": 2**20, "16 MB": 2**24}
SHORT = "short tasks"
TIMES = 10  # products of a task: they take about 10 ms


class Products(nn.Module):
    """Multiply a matrix by itself, over and over, and add the mean to the input, whose size does not matter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(256, 256) / 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.weight
        for _ in range(TIMES):
            y = torch.tanh(y @ self.weight)
        return x + y.mean()


class Mean(nn.Module):
    """Return the mean of everything but the samples and the last dimension of `kept`."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(self.dim, keepdim=x.dim() == 2)


def work(name: str, m: int) -> Work:
    """Return a case's work in m micro-batches, the same in every process."""
    torch.manual_seed(0)
    sgd = partial(_sgd, lr=0.01)
    classes = torch.randint(10, (BATCH,))
    classify = nn.functional.cross_entropy
    if name == "AmoebaNet-D (3, 16)":
        layers, x = amoebanetd(3, 16, num_classes=10), torch.rand(BATCH, 3, 224, 224)
        return Work(layers=layers, balance=(4, 5), chunks=m, input=x, target=classes, loss=classify, optimizer=sgd)
    if name == "transformer":
        blocks = [nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True) for _ in range(6)]
        layers, x = nn.Sequential(*blocks, Mean(1), nn.Linear(128, 10)), torch.rand(BATCH, 64, 128)
        return Work(layers=layers, balance=(3, 5), chunks=m, input=x, target=classes, loss=classify, optimizer=sgd)
    if name == SHORT:
        layers = nn.Sequential(
            *(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.ReLU())), nn.Linear(64, 10)
        )
        x = torch.rand(BATCH, 64)
        return Work(layers=layers, balance=(8, 9), chunks=m, input=x, target=classes, loss=classify, optimizer=sgd)
    x, target = torch.rand(m, MESSAGES[name.removeprefix("messages of ")] // 4), torch.rand(m, 1)
    layers, loss = nn.Sequential(Products(), Products(), Mean(1)), nn.functional.mse_loss
    return Work(layers=layers, balance=(1, 2), chunks=m, input=x, target=target, loss=loss, optimizer=sgd)


def _sgd(module: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr)


CASES = ("AmoebaNet-D (3, 16)", "transformer", *(f"messages of {size}" for size in MESSAGES), SHORT)
