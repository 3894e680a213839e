"""Measure schedules over two ranks, and compare them with other schedules, such as PyTorch's.

All schedules take turns in the same two processes. For a schedule that is compared with another
schedule, the table has these columns:

- `ratio` is the other schedule's time for a step, divided by this schedule's time. It is the median
  over all rounds. If the ratio is above 1, this schedule is faster.
- `replayed` is the ratio that a simulation predicts. The simulation uses the measured times of the
  tasks of both schedules.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from copy import deepcopy
from functools import partial
from itertools import product, starmap
from multiprocessing.connection import Connection
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Module
from torch.nn.functional import mse_loss

from benchmarks.harness import Found, by_case, collect, command, in_format, start
from reproduce.error import Error
from reproduce.records.record import Record, Result
from reproduce.run.engines.launch import Ended, Launched
from reproduce.tables.layout import grid
from torchgpipe.distributed import DistributedGPipe
from torchgpipe.schedules import make
from torchgpipe.timeline.stopwatch import Stopwatch

N = 2
"""The number of ranks."""
LAYERS = 4
"""The number of linear layers on each rank."""

# For each size, the width of the linear layers, and the number of samples in a micro-batch.
SIZES = {
    "short": (512, 64),
    "small": (1024, 64),
    "medium": (1024, 128),
    "large": (2048, 64),
}
# For each number of micro-batches: schedules, each with the schedule to compare it with.
PAIRS = {
    8: {"GPipe": "ScheduleGPipe", "1F1B": "Schedule1F1B"},
    2: {"ZBH1": "1F1B"},
}

Key = tuple[Any, ...]
"""The kind, micro-batch and partition of a task."""
Tasks = dict[Key, float]
"""The seconds of each task."""
Measured = dict[str, tuple[list[float], Tasks]]
"""For each schedule: the seconds of each step, and the seconds of each task."""


class Case(NamedTuple):
    """What to measure: a number of micro-batches, and the size of the tasks (a key of `SIZES`)."""

    micro_batches: int
    size: str


class Job(NamedTuple):
    """A case to measure, the number of rounds, and the seed of all random numbers.

    Parameters, data and the order of the schedules in each round are random.
    """

    case: Case
    rounds: int
    seed: int


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each number of micro-batches with each size of tasks, and print a table."""
    parser = command("schedules", __doc__, rounds=60, seed=0)
    add, sizes, chunks = parser.add_argument, list(SIZES), list(PAIRS)
    add("--size", nargs="+", choices=sizes, default=sizes, help="of the tasks")
    add("--chunks", nargs="+", type=int, choices=chunks, default=chunks, help="micro-batches")
    options = parser.parse_args(arguments)
    title = "seconds of a step over two ranks"
    record = start(options, "schedules", title, {"seconds": "s"}, devices=N)
    cases = list(starmap(Case, product(options.chunks, options.size)))
    found = measure(cases, options.rounds, options.seed)
    shown = in_format(options.format, table)
    collect(record, options.out, found, len(cases), shown)


def measure(cases: Sequence[Case], rounds: int, seed: int) -> Found:
    """Measure cases, and yield for each case a list with one result for each schedule."""
    for case in cases:
        m, size = case
        samples: dict[str, list[float]] = {}
        tasks: dict[str, Tasks] = {}
        for measured in _measured_by_ranks(Job(case, rounds, seed)):
            for name, (seconds, own_tasks) in measured.items():
                samples[name] = seconds
                tasks.setdefault(name, {}).update(own_tasks)
        results = []
        for name in samples:
            values: dict[str, Any] = {}
            other = PAIRS[m].get(name)
            if other is not None:
                turns = zip(samples[other], samples[name], strict=True)
                ratio = statistics.median(theirs / ours for theirs, ours in turns)
                values = {"over": other, "ratio": ratio}
                if tasks[other]:
                    values["replayed"] = _replay(other, m, tasks) / _replay(name, m, tasks)
            timed = {"seconds": samples[name]}
            results.append(Result(f"m={m} {size}", name, "measured", values=values, samples=timed))
        yield results


def _measured_by_ranks(job: Job) -> Iterator[Measured]:
    """Run a case in new processes, the ranks, and yield the measured times of each rank."""
    with (
        TemporaryDirectory() as folder,
        closing(Launched("spawn", N, _rank, folder, job)) as launched,
    ):
        running = set(range(N))
        while running:
            for k, answer in launched.receive(running):
                running.remove(k)
                if isinstance(answer, Ended):
                    raise Error(f"rank {k} ended {answer.how}")
                yield answer


def _replay(name: str, m: int, tasks: dict[str, Tasks]) -> float:
    """Simulate a step of a schedule with each task's measured time; return the step's seconds."""
    schedule = make(name, N, m, 1, "never")
    return schedule.replay(tasks[name].__getitem__).seconds


def _rank(k: int, link: Connection, folder: str, job: Job) -> None:
    """Take part as rank `k` in steps of all schedules, and time the steps and this rank's tasks.

    At the end, send the seconds of all steps and the median seconds of each task to the main
    process, through the pipe `link`.
    """
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=k, world_size=N)
    torch.manual_seed(job.seed)
    case = job.case
    m = case.micro_batches
    width, samples = SIZES[case.size]
    layers = nn.Sequential()
    for _ in range(N * LAYERS):
        layers.append(nn.Linear(width, width))
        layers.append(nn.Tanh())
    x, target = torch.rand(2, m * samples, width)
    names = [*PAIRS[m], *PAIRS[m].values()]
    ways = {name: _way(name, deepcopy(layers), m, x, target) for name in names}
    _check_gradients(list(ways.values()))

    seconds: dict[str, list[float]] = {name: [] for name in ways}
    durations: dict[str, dict[Key, list[float]]] = {name: {} for name in ways}
    order = random.Random(job.seed)
    for turn in range(-3, job.rounds):
        for name in order.sample(sorted(ways), len(ways)):
            way = ways[name]
            way.part.zero_grad()
            dist.barrier()
            began = time.perf_counter()
            way.step()
            dist.barrier()
            ended = time.perf_counter()
            # The step above was timed as a whole. The times of tasks are measured in a second step,
            # because a stopwatch makes a step slower. The stopwatch is an observer of the
            # pipeline. PyTorch's schedules have no observer, so their tasks are not measured.
            stopwatch = Stopwatch({k: torch.device("cpu")})
            way.observed.observer = stopwatch
            way.step()
            way.observed.observer = None
            if turn >= 0:
                seconds[name].append(ended - began)
                for event in stopwatch.events():
                    task = event.kind, event.micro_batch, event.partition
                    durations[name].setdefault(task, []).append(event.end - event.start)

    measured: Measured = {}
    for name, by_task in durations.items():
        typical = {task: statistics.median(found) for task, found in by_task.items()}
        measured[name] = seconds[name], typical
    link.send(measured)
    link.poll(None)  # wait to be killed: the other rank may still need this one


class Way(NamedTuple):
    """A schedule to be measured: the layers of this rank, and the function that runs a step."""

    part: Module
    """The layers of this rank."""
    step: Callable[[], object]
    observed: Any
    """The object that has the attribute `observer`."""


def _way(name: str, layers: nn.Sequential, m: int, x: Tensor, target: Tensor) -> Way:
    rank, size = dist.get_rank(), len(layers) // N
    if name.startswith("Schedule"):
        from reproduce.run.engines.schedules import schedule

        begin = rank * size
        part = layers[begin : begin + size]
        theirs = schedule(name, part, chunks=m, checkpointed=0, loss_fn=mse_loss)
        step = partial(theirs.step, x) if rank == 0 else partial(theirs.step, target=target)
        return Way(part, step, observed=part)
    model = DistributedGPipe(layers, [size] * N, chunks=m, checkpoint="never", schedule=name)
    given = (x, None) if rank == 0 else (None, target)
    return Way(model.partition, partial(model.step, mse_loss, *given), observed=model)


def _check_gradients(ways: Sequence[Way]) -> None:
    """Run one step of each schedule, and check that all of them compute the same gradients."""
    expected: list[Tensor] | None = None
    for way in ways:
        way.step()
        gradients = [p.grad.clone() for p in way.part.parameters() if p.grad is not None]
        if expected is None:
            expected = gradients
        for ours, theirs in zip(gradients, expected, strict=True):
            torch.testing.assert_close(ours, theirs)


def table(record: Record, style: str = "simple") -> str:
    """Render a table that compares schedules, with the milliseconds of a step and their ratio.

    Below the table, a line for each pair of schedules has the geometric mean of their ratios.
    """
    rows: list[list[str]] = []
    ratios: dict[str, list[float]] = {}
    for case, found in by_case(record).items():
        for name, result in found.items():
            values = result.values
            if "over" in values:
                other, ratio = str(values["over"]), float(values["ratio"])
                ratios.setdefault(f"{name} over {other}", []).append(ratio)
                replayed = f"{values['replayed']:.3f}" if "replayed" in values else ""
                ours, theirs = _milliseconds(result), _milliseconds(found[other])
                rows.append([case, name, ours, other, theirs, f"{ratio:.3f}", replayed])
    heads = ["case", "schedule", "ms a step", "beside", "ms a step", "ratio", "replayed"]
    lines = [grid(heads, rows, style), ""]
    for pair, found_ratios in ratios.items():
        mean = statistics.geometric_mean(found_ratios)
        lines.append(f"- The geometric mean of the ratios of {pair} is {mean:.3f}.")
    return "\n".join(lines)


def _milliseconds(result: Result) -> str:
    seconds = float(result.values["seconds"])
    return f"{1000 * seconds:.2f}"


if __name__ == "__main__":
    main()
