"""The cases that `python -m reproduce regression` times: training steps, and steps that are nearly all overhead.

torchgpipe, and the models that use it, are imported only when a case is prepared: the caller first sets `sys.path` to
the version to measure. Every case is one step of one mini-batch, on CPU devices of one thread each.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Model = Literal["linear", "AmoebaNet-D", "U-Net"]
Clock = Literal["cpu", "wall"]
Step = Callable[[], Tensor]
CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}  # CPU time of all threads of the process, or time
WARM_UP = 2  # samples: the first one compiles and allocates, and takes several times as long


@dataclass(frozen=True)
class Case:
    """Configure a training step: a model split by `balance`, a batch in `m` micro-batches, a checkpoint mode.

    A sample is the mean time of `steps` steps in a row. One step may be too short for the clock.
    """

    name: str
    model: Model
    balance: tuple[int, ...]
    m: int
    checkpoint: str
    batch: int
    steps: int = 1


def training(model: Model, batch: int, m: int, balance: tuple[int, int]) -> tuple[Case, ...]:
    """List the three configurations that every experiment compares, at equal batch size."""
    return (
        Case(f"{model} naive", model, balance, 1, "never", batch),
        Case(f"{model} checkpoint-only", model, (sum(balance),), m, "always", batch),
        Case(f"{model} GPipe", model, balance, m, "except_last", batch),
    )


TRAINING = (*training("AmoebaNet-D", 2, 2, (4, 5)), *training("U-Net", 8, 2, (20, 21)))
MACHINERY = tuple(
    Case(f"machinery {checkpoint}", "linear", (1, 1), 8, checkpoint, 8, steps=4) for checkpoint in ("never", "always")
)
CASES = (*MACHINERY, *TRAINING)


def prepare(case: Case) -> Step:
    """Return a function that runs a whole step (forward, loss, backward, optimizer) and returns the loss."""
    from torchgpipe import GPipe

    torch.manual_seed(0)
    layers, x, loss = _build(case)
    devices = ["cpu"] * len(case.balance)
    model = GPipe(layers, case.balance, devices=devices, chunks=case.m, checkpoint=case.checkpoint)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> Tensor:
        value = loss(model(x))
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value.detach()

    return step


def _build(case: Case) -> tuple[nn.Sequential, Tensor, Callable[[Tensor], Tensor]]:
    """Return the layers, an input, and the loss of the output."""
    if case.model == "linear":  # nearly all of the step is overhead of the pipeline
        return nn.Sequential(*(nn.Linear(8, 8) for _ in case.balance)), torch.randn(case.batch, 8), Tensor.sum
    from reproduce.models import amoebanetd, unet

    if case.model == "AmoebaNet-D":  # (3, 8), the smallest there is, on images of the papers' size
        classes = torch.randint(1000, (case.batch,))
        return amoebanetd(3, 8), torch.rand(case.batch, 3, 224, 224), lambda y: F.cross_entropy(y, classes)
    # U-Net (1, 8) of three levels on images of 32 x 32; its skips cross the partitions
    mask = torch.randint(2, (case.batch, 1, 32, 32)).float()
    images = torch.rand(case.batch, 3, 32, 32)
    return unet(3, 1, 8), images, lambda y: F.binary_cross_entropy_with_logits(y, mask)


class Timed:
    """Time a case. `slow_down` adds a delay to each sample, as a share of the median sample."""

    def __init__(self, name: str, clock: Clock, slow_down: float) -> None:
        self.case = next(case for case in CASES if case.name == name)
        self.now = CLOCKS[clock]
        self.step = prepare(self.case)
        self.slow_down = slow_down
        self.own: list[float] = []  # seconds of each sample, without the delay
        for _ in range(WARM_UP):
            self()
        self.own.clear()

    def __call__(self) -> float:
        """Return the seconds per step of a sample."""
        began = self.now()
        for _ in range(self.case.steps):
            self.step()
        ran = self.now()
        self.own.append(ran - began)
        if self.slow_down:
            until = ran + self.slow_down * statistics.median_low(self.own)
            while self.now() < until:  # `sleep` uses no CPU time, and may take longer
                pass
        return (self.now() - began) / self.case.steps
