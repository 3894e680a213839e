"""Validate predictions: a profile taken here, replayed, beside steps measured here.

For each setup the layers are timed alone on a micro-batch of its size, forward and backward apart, and replayed; then
the pipeline itself is timed. Nothing of the measured step goes into the prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter

import torch
from torch import Tensor, nn

from torchgpipe import GPipe
from torchgpipe.balance.minimise import minimise_heaviest
from torchgpipe.balance.profile import Rehearsal, rehearse, undisturbed
from torchgpipe.checkpoint import checkpointed
from torchgpipe.observe import Task
from torchgpipe.plan.predict import Setup
from torchgpipe.replay import Costs, Timeline, replay

__all__ = ["Case", "Profile", "Validated", "cases", "orders", "profile", "replayed", "trace", "validate"]


@dataclass(frozen=True)
class Case:
    """A model and a setup to validate; balanced by the profile where the setup's balance is empty."""

    name: str
    build: Callable[[], nn.Sequential]
    shape: tuple[int, ...]
    partitions: int
    setup: Setup


@dataclass(frozen=True)
class Profile:
    """Seconds of every layer's forward and backward for one micro-batch."""

    forward: list[float]
    backward: list[float]


@dataclass(frozen=True)
class Validated:
    """A case's predicted and measured seconds of a step."""

    case: Case
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """By how much the prediction is off, as a share of what was measured."""
        return self.predicted / self.measured - 1


def cases() -> list[Case]:
    """List the configurations: two models, one and two partitions, several micro-batches, all checkpoint modes."""
    from benchmarks.models import amoebanetd, unet

    def small_amoebanet() -> nn.Sequential:
        return amoebanetd(3, 16)

    def small_unet() -> nn.Sequential:
        return unet(3, 2, 8)

    models = (
        ("AmoebaNet-D (3, 16)", small_amoebanet, (3, 224, 224), 8),
        ("U-Net (2, 8)", small_unet, (3, 96, 96), 16),
    )
    setups: tuple[tuple[int, int, str], ...] = (
        (1, 1, "never"), (1, 4, "always"), (1, 4, "except_last"), (2, 1, "never"), (2, 1, "always"), (2, 2, "never"),
        (2, 2, "except_last"), (2, 2, "always"), (2, 4, "never"), (2, 4, "except_last"), (2, 4, "always"),
    )  # fmt: skip
    return [
        Case(f"{name} n{n}m{m} {mode}", build, shape, n, Setup(batch, (), m, mode))  # type: ignore[arg-type]
        for name, build, shape, batch in models
        for n, m, mode in setups
    ]


def profile(model: nn.Sequential, sample: Tensor, repeats: int = 3) -> Profile:
    """Time every layer alone: the median of `repeats` runs of forward and of backward, after a warm-up."""

    def measure(rehearsal: Rehearsal) -> tuple[float, float]:
        forward, backward = [], []
        for _ in range(repeats + 1):
            value = rehearsal.prepare()
            start = perf_counter()
            rehearsal.forward(value)
            forward.append(perf_counter() - start)
            roots = [x for x in rehearsal.results() if x.requires_grad]
            gradients = [torch.ones_like(x) for x in roots]
            start = perf_counter()
            if roots:
                torch.autograd.backward(roots, gradients)
            backward.append(perf_counter() - start)
        return median(forward[1:]), median(backward[1:])

    cpu = torch.device("cpu")
    with undisturbed(cpu):
        times = list(rehearse(model, sample, cpu, measure))
    return Profile([f for f, _ in times], [b for _, b in times])


def replayed(profiled: Profile, setup: Setup) -> Timeline:
    """Replay the setup with a profile of micro-batches of its size."""
    m, recomputed = len(setup.sizes), checkpointed(setup.checkpoint, len(setup.sizes))
    forward = [sum(profiled.forward[a:b]) for a, b in setup.cuts]
    backward = [sum(profiled.backward[a:b]) for a, b in setup.cuts]
    recompute = [forward if i < recomputed else [0.0] * len(forward) for i in range(m)]
    return replay(Costs([forward] * m, [backward] * m, recompute))


def validate(case: Case, *, steps: int = 3) -> Validated:
    """Profile, predict and measure one case; the measurement is the median of `steps` after a warm-up."""
    torch.manual_seed(0)
    model = case.build()
    sample = torch.rand(case.setup.sizes[0], *case.shape)
    profiled = profile(model, sample)
    costs = [f + b for f, b in zip(profiled.forward, profiled.backward, strict=True)]
    setup = replace(case.setup, balance=case.setup.balance or tuple(minimise_heaviest(costs, case.partitions)))
    predicted = replayed(profiled, setup).seconds

    pipeline = _pipeline(model, setup)
    x = torch.rand(setup.batch_size, *case.shape)
    seconds = []
    for _ in range(steps + 1):
        start = perf_counter()
        output = pipeline(x)
        output.backward(torch.ones_like(output))
        seconds.append(perf_counter() - start)
        pipeline.zero_grad()
    return Validated(replace(case, setup=setup), predicted, median(seconds[1:]))


def trace(model: nn.Sequential, setup: Setup, x: Tensor) -> list[tuple[Task, float, float]]:
    """Run a step after a warm-up, and return its tasks as they began, each with its start and end in seconds."""
    pipeline = _pipeline(model, setup)
    found: list[tuple[Task, float, float]] = []
    pipeline.observer = lambda task: _Stopwatch(task, found)
    for _ in range(2):
        found.clear()
        start = perf_counter()
        output = pipeline(x)
        output.backward(torch.ones_like(output))
    return sorted(((task, a - start, b - start) for task, a, b in found), key=lambda event: event[1])


class _Stopwatch:
    def __init__(self, task: Task, found: list[tuple[Task, float, float]]) -> None:
        self.task, self.found, self.start = task, found, 0.0

    def __enter__(self) -> None:
        self.start = perf_counter()

    def __exit__(self, *_: object) -> None:
        self.found.append((self.task, self.start, perf_counter()))


def _pipeline(model: nn.Sequential, setup: Setup) -> GPipe:
    devices = ["cpu"] * len(setup.balance)
    return GPipe(model, list(setup.balance), devices=devices, chunks=setup.chunks, checkpoint=setup.checkpoint)


def orders(events: Sequence[tuple[str, int, int, float]]) -> dict[int, list[tuple[str, int]]]:
    """Return each partition's tasks in the order in which they start, from (kind, micro-batch, partition, start)."""
    found: dict[int, list[tuple[str, int]]] = {}
    for kind, i, j, _ in sorted(events, key=lambda event: event[3]):
        found.setdefault(j, []).append((kind, i))
    return found


