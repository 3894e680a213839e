"""Works for processes, which make them by name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import replace

import torch
from torch import Tensor, nn

from reproduce.run.engines import Work
from reproduce.run.processes import Processes
from torchgpipe.checkpoint import Mode


def _sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), 0.5)


class Split(nn.Linear):
    """Both tensors take a gradient: PyTorch 2.12's own schedules refuse one between stages that does not."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        y = super().forward(x)
        return y, y.cos()


class Joined(nn.Module):
    """Its partition may have no parameters."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return (pair[0] * pair[1]).tanh()


class Failing(nn.Module):
    """Fails in the second step."""

    steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        if self.steps > 2:
            raise ValueError("no such luck")
        return x


def work(checkpoint: Mode = "never", dropout: float = 0.0) -> Work:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Dropout(dropout), Split(4, 4))
    return Work(
        layers=nn.Sequential(first, Joined()), balance=(1, 1), chunks=2, checkpoint=checkpoint,
        input=torch.rand(6, 4), target=torch.rand(6, 4), loss=nn.functional.mse_loss, optimizer=_sgd,
    )  # fmt: skip


def failing() -> Work:
    return replace(work(), layers=nn.Sequential(nn.Linear(4, 4), Failing()))


def killed() -> Work:
    """Die on the last rank; torchrun then terminates the other."""
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
    return work()


def ids(processes: Processes) -> list[int]:
    """Return torchrun's process id and those of the ranks that it has started."""
    torchrun = processes._torchrun.pid
    listed = subprocess.run(["ps", "--ppid", str(torchrun), "-o", "pid="], capture_output=True, text=True, check=True)
    return [torchrun, *map(int, listed.stdout.split())]


if __name__ == "__main__":  # start processes, say so, and wait to be killed
    from tests.reproduce.run import works  # what another process can import

    with closing(Processes(2)) as processes:
        processes.make("ranks", works.work)
        print(*ids(processes), flush=True)
        sys.stdin.read()
