"""Emulate a training step on n devices with one.

The library runs every task of the step, one at a time, on one real device, which holds all partitions. Each task is
timed by itself: on a CPU by its thread's CPU time, on CUDA by events. Then the schedule is replayed over these times
as n devices would overlap. So outputs and gradients are real, and only the overlap is worked out. The field calls it
trace-driven simulation.

It leaves out what devices do to each other: they share memory bandwidth and the interpreter's lock, and take time to
hand tensors over. `docs/prediction.md` says how much that is.
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

from reproduce.experiments import Row
from reproduce.machine.devices import Devices
from reproduce.models.counted import counted, setup_of
from reproduce.records.places import Json
from reproduce.run.timed import Samples, Values, busy
from reproduce.run.training import Balancer, FakeData, Training, make_optimizer, record_tasks, update
from torchgpipe.engine.schedule import overlaps
from torchgpipe.plan.hardware.hardware import Hardware, hardware_names
from torchgpipe.plan.memory import setup_memory
from torchgpipe.plan.predict import Predictor, Setup
from torchgpipe.plan.replay import Costs, Timeline, replay
from torchgpipe.tensors.observe import Kind, Task
from torchgpipe.timeline.stopwatch import Mark

MOST_EXECUTED = 4  # micro-batches of a step; the times of equal ones stand for the rest


@dataclass(frozen=True)
class Executed:
    """The tasks of one step as they were run: the seconds of each, of the loss, and of each partition's optimizer.

    In all they took `work` seconds of the device, and `wall` seconds on the clock; `value` is the loss.
    """

    tasks: Mapping[Task, float]
    loss: float
    updates: Sequence[float]
    work: float
    wall: float
    value: float


class EmulatedStep(NamedTuple):
    """Hold the time of a step on n devices: `seconds` with the copies of a described link, `here` without copies.

    `work` is the time that one device took for all tasks.
    """

    seconds: float
    here: float
    work: float
    timeline: Timeline


def shortened(row: Row, most: int = MOST_EXECUTED) -> Row:
    """Return the row with `most` of its micro-batches, or all, in the same sizes; the last one may be smaller.

    A smaller batch may split into other sizes. Then the row has the least number above `most` that does not.
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
    """Emulate steps of one row.

    Attributes:
        row: the whole row, with the balance that is used.
        runs: of its steps so far.
    """

    def __init__(
        self, row: Row, devices: Devices, data: FakeData, balancer: Balancer, seed: int, link: Link | None = None
    ) -> None:
        """Build everything.

        With a `link`, copies between devices take the time that it says, and devices work at the same time, as GPUs do.
        Without one, devices are like this machine's: CPU devices copy nothing.
        """
        self.training = Training(shortened(row), devices, data, balancer, seed, emulates=row)
        self.row = replace(row, balance=self.training.row.balance)
        self.executed = self.training.row.micro_batches or 1
        self.devices, self.link = devices, link
        self.runs: list[Executed] = []
        with_parameters = [each for each in self.training.partitions if any(True for _ in each.parameters())]
        self.optimizers = [make_optimizer(row, partition) for partition in with_parameters]

    def run(self) -> Executed:
        """Run the tasks of one more step, one at a time."""
        training, device = self.training, self.training.devices[0]
        losses = []
        with replace(self.devices, threads=1).in_use():  # the CPU time of further threads would not be counted
            self.devices.synchronize()
            started = Mark(device)
            watched = record_tasks(training, lambda: losses.append(training.forward_and_backward())).tasks
            updated = [Mark(device)]
            for optimizer in self.optimizers:
                update(optimizer)
                updated.append(Mark(device))
            self.devices.synchronize()

        since = Mark.work_since
        last = max((each.end for each in watched if each.task.kind == "forward"), key=lambda mark: mark.time)
        first = min((each.start for each in watched if each.task.kind != "forward"), key=lambda mark: mark.time)
        run = Executed(
            tasks={each.task: since(each.end, each.start) for each in watched},
            loss=since(first, last),
            updates=[since(end, start) for start, end in pairwise(updated)],
            work=since(updated[-1], started),
            wall=updated[-1].since(started),
            value=float(losses[0]),
        )
        self.runs.append(run)
        return run

    def step(self) -> EmulatedStep:
        """Replay a step of which each task takes its median share of a run's work.

        The slowest partition decides how long a step takes. In a single run that may be one that was disturbed.
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
            timeline = replay(replace(costs, copy=copy, skips=skips, ahead="dependency" in self.row.components))
        return EmulatedStep(timeline.seconds + updates, here.seconds + updates, work, timeline)

    @property
    def config(self) -> dict[str, Json]:
        """Give the row's configuration as it was run, and the hardware of whose links its copies are."""
        return {**self.row.config(), **({} if self.link is None else {"link": self.link.title})}

    def watch(self) -> tuple[Values, Timeline]:
        """Say how busy each device is in the replay, and how many micro-batches were run for it."""
        timeline = self.step().timeline
        return {"executed": self.executed, **busy(timeline)}, timeline

    def samples(self) -> Samples:
        """Return what a record keeps of the runs: the emulated step, as quick or as slow as each run was."""
        step, runs = self.step(), self.runs
        return {
            "step_time": [step.seconds * run.work / step.work for run in runs],
            "here_time": [step.here * run.work / step.work for run in runs],
            "work_time": [run.work for run in runs],
            "wall_time": [run.wall for run in runs],
            "loss": [run.value for run in runs],
        }

    def _costs(self, seconds: Mapping[Task, float], loss: float) -> Costs:
        """Return what every task of the whole step takes. Tasks that were not run take what equal ones took."""
        n, run, count = self.row.devices, self.executed, self.row.micro_batches or 1

        def table(kind: Kind) -> list[list[float]]:
            times = [[seconds.get(Task(kind, i, j), 0.0) for j in range(n)] for i in range(run)]
            return times if run == count else [times[i % (run - 1)] for i in range(count - 1)] + times[-1:]

        return Costs(
            forward=table("forward"),
            backward=table("backward"),
            recompute=table("recompute"),
            loss=loss * self.row.batch_size / self.training.row.batch_size,
            # CPU devices that cannot overlap run one after another in one thread.
            ahead="dependency" in self.row.components and (self.devices.kind != "cpu" or overlaps(count, n)),
            blocking="streams" not in self.row.components,
        )


def memory_needed(row: Row) -> str:
    """Say what the row's partitions take together, as counted on `meta`."""
    ran = shortened(row)
    counts = counted(ran.model, ran.size, ran.input_shape)
    setup = setup_of({**ran.config(), "components": None}, len(counts))
    peak = sum(device.peak for device in setup_memory(counts, setup))
    return f"its {ran.devices} partition(s) take {peak / 2**30:.0f} GiB on the one device that plays all"


class Link:
    """Work out how long the copies of a step take, from a hardware description.

    `papers` are the rows of the published model, by name. Where they are given, a copy takes the share of a
    micro-batch's forward that it takes with the published model, because a smaller model computes less for each byte
    that it copies, and a core computes less than a GPU.
    """

    def __init__(self, hardware: Hardware, papers: Mapping[str, Row] | None) -> None:
        self.hardware, self.papers = hardware, papers
        self.title = hardware.name if papers is None else f"{hardware.name}, in proportion to the tasks"
        self._predictor = functools.cache(lambda *model: Predictor(counted(*model, memory=False), hardware))

    def copies(self, row: Row, forward: float) -> tuple[list[float], dict[tuple[int, int], float]]:
        """Return the seconds of each boundary's copy and of each skip's, where a micro-batch's forward takes so many.

        Each is one way; a skip is named by the partitions that stash and pop it.
        """
        paper = row
        if self.papers is not None:
            paper = self.papers.get(row.name.partition("/")[0]) or next(iter(self.papers.values()))
        predictor = self._predictor(paper.model, paper.size, paper.input_shape)
        setup = Setup(
            batch_size=paper.batch_size,
            balance=row.balance or (),
            chunks=paper.chunks or 1,
            portals="portals" in row.components,
        )
        boundaries, skips = predictor.copies(setup)
        share = 1.0 if self.papers is None else forward / sum(predictor.layers(setup.sizes[0]).forward)
        return [each * share for each in boundaries], {route: each * share for route, each in skips.items()}


def own_links(devices: Devices) -> str | None:
    """Name the shipped description of a node of GPUs like the first of `devices`; None where there is none."""
    if devices.kind != "cuda":
        return None
    words = re.findall(r"[a-z0-9]+", torch.cuda.get_device_name(0).lower())
    return next((name for name in hardware_names() if name.rpartition("x")[0] in words), None)
