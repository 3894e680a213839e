"""Note the order in which the devices of a pipeline run their tasks in a training step."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import product

import torch
from torch.nn import Linear, Sequential

from benchmarks.gates.counted import criterion
from benchmarks.pipelines import ENGINES, on_cpu
from torchgpipe.schedules import make
from torchgpipe.schedules.action import LETTERS
from torchgpipe.schedules.named import NAMED
from torchgpipe.tensors.checkpoint import MODES, Mode
from torchgpipe.tensors.observe import Task

N, M = 3, 5
"""The numbers of devices and of micro-batches."""
# Engines and schedules. The graph engine orders the tasks of GPipe by itself.
OTHERS = [name for name in NAMED if name != "GPipe"]
NOTED = [*product(ENGINES, ["GPipe"]), *product(["workers"], OTHERS)]
_LETTER = dict(zip(LETTERS.values(), LETTERS, strict=True))


def orders() -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each configuration, and a list with a text for each device's tasks."""
    for (engine, schedule), mode in product(NOTED, MODES):
        yield f"{schedule} {mode} {engine}", order(engine, schedule, mode)


def order(engine: str, schedule: str, mode: Mode) -> list[str]:
    """Return for each device the order of its tasks in a training step, such as `0a 1a R0a B0a`.

    In this text, `0a` is the forward of micro-batch 0 on stage a, `R0a` is its recomputation, and
    `B0a` is its backward. `torchgpipe.schedules.texts` explains these texts. But here each task has
    the letter of its stage, even if each device has a single stage.
    """
    placement = make(schedule, N, M).placement
    tasks: list[list[str]] = [[] for _ in range(N)]

    def observe(task: Task) -> AbstractContextManager[object]:
        if task.kind != "copy":
            letter = "" if task.kind == "forward" else _LETTER[task.kind]
            device = placement[task.partition]
            stage = "ab"[task.partition >= N]
            tasks[device].append(f"{letter}{task.micro_batch}{stage}")
        return nullcontext()

    layers = Sequential()
    for _ in placement:
        layers.append(Linear(2, 2))
    pipeline = on_cpu(
        layers,
        [1] * len(placement),
        engine,
        devices=["cpu"] * N,
        schedule=schedule,
        chunks=M,
        checkpoint=mode,
    )
    pipeline.observer = observe
    x = torch.randn(M, 2)
    if schedule == "GPipe":
        criterion(pipeline(x), x).backward()
    else:
        pipeline.step(criterion, x, x)
    return list(map(" ".join, tasks))
