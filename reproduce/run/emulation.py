"""Emulate a training step on n devices with one.

The library runs every task of the step, one at a time, on one real device, which holds all partitions. Each task is
timed alone: on a CPU by its thread's CPU time, on CUDA by events. Then the schedule of n devices is replayed with these
times. So outputs and gradients are real, and only the overlap of devices is computed. This is called trace-driven
simulation.

It neglects how devices slow each other down: they share memory bandwidth and the GIL, and passing a tensor on takes
time. `docs/prediction.md` says how much that is.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import torch

from reproduce.experiments.row import Row
from reproduce.machine.devices import Devices
from reproduce.models.counted import counted, setup_of
from reproduce.records.places import Json
from reproduce.run.timed import Samples, Values, busy
from reproduce.run.training import (
    Balancer,
    FakeData,
    Training,
    make_optimizer,
    record_tasks,
    update,
)
from torchgpipe.engine.arrangement import overlaps
from torchgpipe.plan.hardware.hardware import Hardware, hardware_names
from torchgpipe.plan.memory import setup_memory
from torchgpipe.plan.predict import Predictor, Setup
from torchgpipe.plan.replay import Costs, Timeline, replay
from torchgpipe.tensors.observe import Kind, Task
from torchgpipe.timeline.stopwatch import Mark

MOST_EXECUTED = 4  # micro-batches to run per step; the others are assumed to take as long


@dataclass(frozen=True)
class Executed:
    """The times of one step: the seconds of each task, of computing the loss, and of each partition's update.

    In total the step took `work` seconds of the device. `value` is the loss.
    """

    tasks: Mapping[Task, float]
    loss: float
    updates: Sequence[float]
    work: float
    value: float


class EmulatedStep(NamedTuple):
    """Hold the time of a step on n devices: `seconds` with the copies over a `Link`, `here` without copies.

    `work` is the time that all tasks took on the one real device.
    """

    seconds: float
    here: float
    work: float
    timeline: Timeline


def shortened(row: Row, most: int = MOST_EXECUTED) -> Row:
    """Return the row with only `most` of its micro-batches, of the same sizes; the last one may be smaller.

    A smaller batch may not split into the same sizes. Then take the smallest number above `most` that does, or all.
    """
    count, size = row.micro_batches, row.micro_batch_size
    if count is None or size is None:
        return row
    last = row.batch_size - size * (count - 1)
    for few in range(most, count):
        fewer = replace(row, batch_size=size * (few - 1) + last, chunks=few)
        if (fewer.micro_batches, fewer.micro_batch_size) == (few, size):
            return fewer
    return row


class Emulation:
    """Emulate steps of a `row` in the balance that is used; `runs` has the times of its steps so far."""

    def __init__(
        self,
        row: Row,
        devices: Devices,
        data: FakeData,
        balancer: Balancer,
        seed: int,
        link: Link | None = None,
    ) -> None:
        """Build everything. With a `link`, copies take its times, and recomputation starts early, as on GPUs.

        Without one, devices are like this machine's, and copies take no time.
        """
        self.training = Training(shortened(row), devices, data, balancer, seed, emulates=row)
        self.row = replace(row, balance=self.training.row.balance)
        self.executed = self.training.row.micro_batches or 1
        self.devices, self.link = devices, link
        self.runs: list[Executed] = []
        with_parameters = [
            each for each in self.training.partitions if any(True for _ in each.parameters())
        ]
        self.optimizers = [make_optimizer(row, partition) for partition in with_parameters]

    def run(self) -> Executed:
        """Run one more step, a task at a time."""
        training, device = self.training, self.training.devices[0]
        losses = []
        with replace(
            self.devices, threads=1
        ).in_use():  # a task's CPU time is that of its own thread only
            self.devices.synchronize()
            started = Mark(device)
            watched = record_tasks(
                training, lambda: losses.append(training.forward_and_backward())
            ).tasks
            updated = [Mark(device)]
            for optimizer in self.optimizers:
                update(optimizer)
                updated.append(Mark(device))
            self.devices.synchronize()

        since = Mark.work_since
        last = max(
            (each.end for each in watched if each.task.kind == "forward"),
            key=lambda mark: mark.time,
        )
        first = min(
            (each.start for each in watched if each.task.kind != "forward"),
            key=lambda mark: mark.time,
        )
        run = Executed(
            tasks={each.task: since(each.end, each.start) for each in watched},
            loss=since(first, last),
            updates=[since(end, start) for start, end in pairwise(updated)],
            work=since(updated[-1], started),
            value=float(losses[0]),
        )
        self.runs.append(run)
        return run

    def step(self) -> EmulatedStep:
        """Replay a step in which each task takes the median, over runs, of its share of the work.

        The slowest partition determines the time of a step. In a single run, that may be one that was disturbed.
        """
        runs = self.runs
        work = median(run.work for run in runs)

        def typical(seconds: Iterable[float]) -> float:
            return work * median(each / run.work for each, run in zip(seconds, runs, strict=True))

        tasks = {task: typical(run.tasks[task] for run in runs) for task in runs[0].tasks}
        costs = self._costs(tasks, typical(run.loss for run in runs))
        updates = max(map(typical, zip(*(run.updates for run in runs), strict=True)))
        here = timeline = replay(costs)
        if self.link is not None:
            copy, skips = self.link.copies(self.row, sum(costs.forward[0]))
            timeline = replay(
                replace(costs, copy=copy, skips=skips, ahead="dependency" in self.row.components)
            )
        return EmulatedStep(timeline.seconds + updates, here.seconds + updates, work, timeline)

    @property
    def config(self) -> dict[str, Json]:
        """Give the row's configuration as it was run, and the hardware description of its copies."""
        return {**self.row.config(), **({} if self.link is None else {"link": self.link.title})}

    def watch(self) -> tuple[Values, Timeline]:
        """Return utilization and bubble of the replay, the number of micro-batches that were run, and the timeline."""
        timeline = self.step().timeline
        return {"executed": self.executed, **busy(timeline)}, timeline

    def samples(self) -> Samples:
        """Return samples for the record: the emulated step time, scaled by each run's share of the median work."""
        step, runs = self.step(), self.runs
        return {
            "step_time": [step.seconds * run.work / step.work for run in runs],
            "here_time": [step.here * run.work / step.work for run in runs],
            "work_time": [run.work for run in runs],
            "loss": [run.value for run in runs],
        }

    def _costs(self, seconds: Mapping[Task, float], loss: float) -> Costs:
        """Return the time of every task of the step. Tasks that were not run take as long as equal ones that were."""
        n, run, count = self.row.devices, self.executed, self.row.micro_batches or 1

        def table(kind: Kind) -> list[list[float]]:
            times = [[seconds.get(Task(kind, i, j), 0.0) for j in range(n)] for i in range(run)]
            return (
                times
                if run == count
                else [times[i % (run - 1)] for i in range(count - 1)] + times[-1:]
            )

        return Costs(
            forward=table("forward"),
            backward=table("backward"),
            recompute=table("recompute"),
            loss=loss * self.row.batch_size / self.training.row.batch_size,
            # If CPU devices cannot overlap, GPipe runs all tasks in one thread.
            ahead="dependency" in self.row.components
            and (self.devices.kind != "cpu" or overlaps(count, n)),
            blocking="streams" not in self.row.components,
        )


def memory_needed(row: Row) -> str:
    """Say how much memory the row's partitions take together, as counted on `meta`."""
    ran = shortened(row)
    counts = counted(ran.sized)
    setup = setup_of({**ran.config(), "components": None}, len(counts))
    peak = sum(device.peak for device in setup_memory(counts, setup))
    return f"its {ran.devices} partition(s) take {peak / 2**30:.0f} GiB on the one device that plays all"


class Link:
    """Compute the times of a step's copies from a hardware description.

    `papers` are the rows of the published model, by name. If given, the ratio of a copy's time to a forward's is that
    of the published model. Otherwise copies would be too cheap or too expensive: a smaller model computes less
    per byte that it copies, and a CPU core computes less than a GPU.
    """

    def __init__(self, hardware: Hardware, papers: Mapping[str, Row] | None) -> None:
        self.hardware, self.papers = hardware, papers
        self.title = (
            hardware.name if papers is None else f"{hardware.name}, in proportion to the tasks"
        )
        self._predictor = functools.cache(lambda model: Predictor(counted(model), hardware))

    def copies(self, row: Row, forward: float) -> tuple[list[float], dict[tuple[int, int], float]]:
        """Return the seconds of each boundary's copy and of each skip's, if a micro-batch's forward takes `forward`.

        Times are for one direction. A skip's key is the partitions that stash and pop it.
        """
        paper = row
        if self.papers is not None:
            paper = self.papers.get(row.name.partition("/")[0]) or next(iter(self.papers.values()))
        predictor = self._predictor(paper.sized)
        setup = Setup(
            batch_size=paper.batch_size,
            balance=row.balance or (),
            chunks=paper.chunks or 1,
            portals="portals" in row.components,
        )
        boundaries, skips = predictor.copies(setup)
        share = (
            1.0 if self.papers is None else forward / sum(predictor.layers(setup.sizes[0]).forward)
        )
        return [each * share for each in boundaries], {
            route: each * share for route, each in skips.items()
        }


def own_links(devices: Devices) -> str | None:
    """Return the name of the shipped hardware description with GPUs like those here; None if there is none."""
    if devices.kind != "cuda":
        return None
    words = re.findall(r"[a-z0-9]+", torch.cuda.get_device_name(0).lower())
    return next((name for name in hardware_names() if name.rpartition("x")[0] in words), None)
