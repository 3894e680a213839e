"""Emulate a training step on n devices with a single device (trace-driven simulation).

1. One real device holds all partitions. It runs the tasks of the step one at a time. A task is the
   forward, recomputation or backward of one micro-batch in one partition.
2. Each task is timed: on a CPU by the CPU time of its thread, on a GPU by CUDA events.
3. The schedule of n devices is replayed with these times, which gives the time of the step.

So outputs and gradients are real, and only the overlap of devices is computed.

For a GPU, the host has to issue each task, that is, to launch its kernels. This also takes time.
So the schedule is replayed for two cases:

- Each device has its own thread on the host, as with a process for each GPU.
- One thread issues the tasks of all devices. It may issue them more slowly than the GPUs run them.

The emulation leaves out that devices of one machine slow each other down, because they share memory
bandwidth and the GIL. Without a `Link`, it also leaves out the time to pass a tensor to the next
device. The column emul./meas. of tables shows how large these effects are.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle, islice, pairwise
from operator import attrgetter
from statistics import median
from typing import NamedTuple

from torch.optim import Optimizer

from reproduce.experiments.row import Row
from reproduce.machine.devices import Devices
from reproduce.machine.issuing import Pauses
from reproduce.models.counted import counted, setup_of
from reproduce.predict.link import Link
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
from torchgpipe.plan.predict.memory import setup_memory
from torchgpipe.plan.predict.replay import Costs, Timeline, replay
from torchgpipe.tensors.observe import Kind, Task
from torchgpipe.timeline.stopwatch import Mark

MOST_EXECUTED = 2
"""How many micro-batches are run in a step. All other micro-batches get the same times."""
ISSUED = 3  # how many steps are run to measure how long the host issues each task
KINDS: tuple[Kind, ...] = ("forward", "recompute", "backward")
Seconds = Mapping[Task, float]
"""The seconds of each task that was run."""
Table = list[list[float]]  # a list for each micro-batch, with the seconds for each partition


@dataclass(frozen=True)
class Executed:
    """The times, in seconds, of a training step that one device has run, and the loss.

    Attributes:
        tasks: The time of each forward, recomputation and backward of a micro-batch in a partition.
        loss: The time of computing the loss.
        updates: The time of the optimizer step of each partition.
        work: The time of the whole step on the one device.
        value: The loss.
    """

    tasks: Mapping[Task, float]
    loss: float
    updates: Sequence[float]
    work: float
    value: float


class EmulatedStep(NamedTuple):
    """An emulated training step on n devices.

    Attributes:
        seconds: The emulated seconds of the step. If the emulation has a `link`, which says how
            long copies between devices take, these seconds include the copies.
        here: The emulated seconds of the step if copies between devices take no time.
        work: The seconds that the whole step took on the one real device (the median).
        timeline: The emulated tasks, with their times.
    """

    seconds: float
    here: float
    work: float
    timeline: Timeline


def shortened(row: Row, most: int = MOST_EXECUTED) -> Row:
    """Return a copy of a row (configuration) with only `most` micro-batches, for shorter steps.

    The micro-batches keep their sizes. The last one can be smaller than the others, and stays so.
    If no batch size splits into `most` micro-batches of these sizes, the copy gets the next larger
    possible number. A row with at most `most` micro-batches does not change.
    """
    count = row.micro_batches
    size = row.micro_batch_size
    if count is None or size is None:
        return row
    last = row.batch_size - size * (count - 1)
    for few in range(most, count):
        fewer = replace(row, batch_size=size * (few - 1) + last, chunks=few)
        if fewer.micro_batches == few and fewer.micro_batch_size == size:
            return fewer
    return row


class Emulation:
    """An emulation of the training of a row (configuration). `runs` has the times of each step."""

    def __init__(  # noqa: PLR0913 - those of `Training`, and the link
        self,
        row: Row,
        devices: Devices,
        data: FakeData,
        balancer: Balancer,
        seed: int,
        link: Link | None = None,
    ) -> None:
        """Build the model, its optimizers and everything else that a step needs.

        A `link` says how long copies between devices take. With a link, the emulated devices are
        like GPUs: copies take this time, and a recomputation may start before its gradients arrive.
        Without a link, they are like the devices of this machine, and copies take no time.
        """
        self.training = Training(shortened(row), devices, data, balancer, seed, emulates=row)
        self.row = replace(row, balance=self.training.row.balance)
        self.executed = self.training.row.micro_batches or 1
        self.devices = devices
        self.link = link
        self.runs: list[Executed] = []
        self.optimizers: list[Optimizer] = []
        for partition in self.training.partitions:
            parameters = list(partition.parameters())
            if parameters:
                self.optimizers.append(make_optimizer(row, partition))

    def run(self) -> Executed:
        """Run one more step on the one real device, a task at a time; return the measured times."""
        training = self.training
        device = training.devices[0]
        one_thread = replace(self.devices, threads=1)  # else CPU time is incomplete
        with one_thread.in_use():
            self.devices.synchronize()
            started = Mark(device)
            stopwatch, loss = record_tasks(training, training.forward_and_backward)
            updated = [Mark(device)]
            for optimizer in self.optimizers:
                update(optimizer)
                updated.append(Mark(device))
            self.devices.synchronize()

        tasks = {}
        forward_ends = []
        other_starts = []
        for task, start, end in stopwatch.tasks:
            tasks[task] = end.work_since(start)
            if task.kind == "forward":
                forward_ends.append(end)
            else:
                other_starts.append(start)
        by_time = attrgetter("time")
        last_forward = max(forward_ends, key=by_time)
        first_backward = min(other_starts, key=by_time)
        run = Executed(
            tasks=tasks,
            loss=first_backward.work_since(last_forward),
            updates=[end.work_since(start) for start, end in pairwise(updated)],
            work=updated[-1].work_since(started),
            value=float(loss),
        )
        self.runs.append(run)
        return run

    def step(self, issue: Seconds | None = None) -> EmulatedStep:
        """Compute the emulated step on n devices, in which each task takes its typical time.

        In each step that was run (`runs`), a task took a fraction of the step's time. The typical
        time of the task is the median fraction, multiplied by the median time of a step. With the
        times of a single step, one disturbed task could make the whole emulated step too slow.

        Args:
            issue: For each task, the seconds in which the host launches its kernels, if one thread
                launches the kernels of all devices. If None, each device has its own thread.
        """
        work = median([run.work for run in self.runs])
        loss = self._typical([run.loss for run in self.runs])
        updates = zip(*[run.updates for run in self.runs], strict=True)  # of each partition
        longest_update = max(map(self._typical, updates))

        costs = self._costs(self._task_seconds(), loss)
        if issue is not None:
            issued: dict[Kind, Table] = {kind: self._table(kind, issue) for kind in KINDS}
            costs = replace(costs, issue=issued)
        here = replay(costs)
        timeline = here if self.link is None else self._replay_linked(costs, self.link)
        seconds_there = timeline.seconds + longest_update
        return EmulatedStep(seconds_there, here.seconds + longest_update, work, timeline)

    def _typical(self, seconds: Iterable[float]) -> float:
        """Return the typical seconds of a task (see `step`), given its seconds in each step."""
        shares = [each / run.work for each, run in zip(seconds, self.runs, strict=True)]
        return median([run.work for run in self.runs]) * median(shares)

    def _task_seconds(self) -> Seconds:
        """Return the typical time of each task."""
        tasks = {}
        for task in self.runs[0].tasks:
            tasks[task] = self._typical([run.tasks[task] for run in self.runs])
        return tasks

    def _replay_linked(self, costs: Costs, link: Link) -> Timeline:
        """Replay a step with the times that the link computes for copies between devices."""
        forward = sum(costs.forward[0])
        copy, skips = link.copies(self.row, forward)
        ahead = "dependency" in self.row.components
        return replay(replace(costs, copy=copy, skips=skips, ahead=ahead))

    @property
    def config(self) -> dict[str, Json]:
        """Return the row's settings, with its balance and the name of the link for copies."""
        config = self.row.config()
        if self.link is not None:
            config["link"] = self.link.title
        return config

    def watch(self) -> tuple[Values, Timeline]:
        """Return the utilization, the bubble and further values, and the emulated step's timeline.

        On GPUs, the values include the seconds of each task on the GPU, and on the host.
        """
        timeline = self.step().timeline
        values = {"executed": self.executed, **busy(timeline)}
        if self.devices.kind == "cuda":
            values |= self.issued_by_one_thread()
        return values, timeline

    def issued_by_one_thread(self) -> Values:
        """Measure how long the host issues each task (launches its kernels); return these values:

        - `task_time`: the seconds of each task on its device
        - `issue_time`: the seconds for which the host issues each task
        - `one_thread_time`: the seconds of the step if one thread issues the tasks of all devices
        """
        runs = [self._issue_seconds() for _ in range(ISSUED)]
        issue = {}
        for task in runs[0]:
            issue[task] = median([run[task] for run in runs])
        tasks = self._task_seconds()
        return {
            "task_time": {kind: self._run_table(kind, tasks) for kind in KINDS},
            "issue_time": {kind: self._run_table(kind, issue) for kind in KINDS},
            "one_thread_time": self.step(issue).seconds,
        }

    def _issue_seconds(self) -> Seconds:
        """Run a step; return for how many seconds the host issued each task (launched its kernels).

        Before each task and between layers, the host pauses until the device is idle. Otherwise the
        host might wait because the device's queue of kernels is full, and this time would count.
        """
        training = self.training
        layers = chain.from_iterable(each.children() for each in training.partitions)
        with Pauses(layers, self.devices.synchronize) as pauses:
            stopwatch, _ = record_tasks(
                training, training.forward_and_backward, before=pauses.pause
            )
        for optimizer in self.optimizers:
            update(optimizer)
        seconds = {}
        for task, start, end in stopwatch.tasks:
            paused = pauses.seconds(start.time, end.time)
            seconds[task] = end.time - start.time - paused
        return seconds

    def samples(self) -> Samples:
        """Return lists of values for the record, with one value for each step that was run.

        There is only one emulated step time, which comes from all steps that were run. So the
        values are this time multiplied by w / (median of w), where w is the number of seconds that
        a step took on the one real device.
        """
        step = self.step()
        samples: Samples = {"step_time": [], "here_time": [], "work_time": [], "loss": []}
        for run in self.runs:
            samples["step_time"].append(step.seconds * run.work / step.work)
            samples["here_time"].append(step.here * run.work / step.work)
            samples["work_time"].append(run.work)
            samples["loss"].append(run.value)
        return samples

    def _run_table(self, kind: Kind, seconds: Seconds) -> Table:
        """Return the seconds of one kind of task in each micro-batch that was run, by partition.

        A task that does not exist, such as the recomputation of a micro-batch without a checkpoint,
        takes 0 seconds.
        """
        table = []
        for i in range(self.executed):
            of_partitions = [seconds.get(Task(kind, i, j), 0.0) for j in range(self.row.devices)]
            table.append(of_partitions)
        return table

    def _table(self, kind: Kind, seconds: Seconds) -> Table:
        """Return the seconds of one kind of task in each micro-batch of the step, by partition.

        Only the first micro-batches and the last one were run. The tasks of the others get the
        times of the first micro-batches, in rotation.
        """
        table = self._run_table(kind, seconds)
        count = self.row.micro_batches or 1
        if self.executed == count:
            return table
        *full, last = table  # only the last micro-batch may be smaller than the others
        return [*islice(cycle(full), count - 1), last]

    def _costs(self, seconds: Seconds, loss: float) -> Costs:
        """Return the times of all tasks of the step, which are needed to replay the schedule."""
        row = self.row
        # If CPU devices cannot overlap, GPipe runs all tasks in one thread.
        can_overlap = self.devices.kind != "cpu" or overlaps(row.micro_batches or 1, row.devices)
        return Costs(
            forward=self._table("forward", seconds),
            backward=self._table("backward", seconds),
            recompute=self._table("recompute", seconds),
            loss=loss * row.batch_size / self.training.row.batch_size,
            ahead="dependency" in row.components and can_overlap,
            blocking="streams" not in row.components,
        )


def memory_needed(row: Row) -> str:
    """Return a text for an error message: the memory that all partitions take on one device."""
    ran = shortened(row)
    counts = counted(ran.sized)
    config = ran.config()
    config["components"] = None
    setup = setup_of(config, len(counts))
    peak = sum(device.peak for device in setup_memory(counts, setup))
    return (
        f"its {ran.devices} partition(s) take {peak / 2**30:.0f} GiB "
        "on the one device that plays all"
    )
