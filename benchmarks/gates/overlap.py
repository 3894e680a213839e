"""Measure the speed-up of pipelining on CPU: naive model parallelism, this pipeline, and the replay.

    python -m benchmarks.gates.overlap                       # AmoebaNet-D (6, 64), batch 32, n = 2, one core per device
    python -m benchmarks.gates.overlap --keep-freed-memory   # freed memory is not returned to the system

All configurations run in turn, one training step each per round, so that slow phases of the machine affect all of
them. A speed-up is the median, over rounds, of naive's time divided by the configuration's. The replay is the shortest
step that the schedule allows with the measured task times: medians over the same rounds, each task running alone.
A recomputation may start before its gradient arrives, which hides it in the bubble. "If it waited" is the replay of a
schedule in which it waits for its gradient.
"""

import statistics
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.harness import Found, by_case, collect, command, positive, start
from benchmarks.pipelines import on_cpu
from reproduce.machine.allocator import keep_freed_memory
from reproduce.models import amoebanetd
from reproduce.records.record import Record, Result
from reproduce.run.turns import turns
from reproduce.tables import layout
from reproduce.tables.layout import Column
from torchgpipe import GPipe
from torchgpipe.balance import balance_by_time
from torchgpipe.plan.replay import Costs, replay
from torchgpipe.tensors.observe import Task

IMAGE = (3, 224, 224)
WARM_UP = 2  # rounds: the first starts the workers
GAIN = "x naive"


def step(model: GPipe, x: Tensor, target: Tensor) -> float:
    """Run one step without an optimizer; return its seconds."""
    began = time.perf_counter()
    model.zero_grad()
    nn.functional.cross_entropy(model(x), target).backward()
    return time.perf_counter() - began


class Alone:
    """Measure every task of `model` alone. On a CPU, the graph engine runs one task at a time."""

    def __init__(self, model: GPipe) -> None:
        self.model = model
        self.times: dict[Task, list[float]] = {}
        model.observer = self._clock

    @contextmanager
    def _clock(self, task: Task) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.times.setdefault(task, []).append(time.perf_counter() - began)

    def costs(self) -> Costs:
        """Return each task's median time, without warm-up steps."""
        m, n = 1 + max(task.micro_batch for task in self.times), len(self.model.partitions)

        def table(kind: str) -> list[list[float]]:
            return [
                [statistics.median(self.times.get(Task(kind, i, j), [0.0, 0.0, 0.0])[WARM_UP:]) for j in range(n)]  # type: ignore[arg-type]
                for i in range(m)
            ]

        return Costs(table("forward"), table("backward"), table("recompute"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = command("gates.overlap", __doc__, rounds=20)
    parser.add_argument("--size", type=positive, nargs=2, default=(6, 64), metavar=("L", "D"))
    parser.add_argument("--batch", type=positive, default=32)
    parser.add_argument("--chunks", type=positive, nargs="+", default=[2, 4, 8])
    parser.add_argument("--checkpoint", default="never", choices=["never", "except_last", "always"])
    parser.add_argument("--balance", type=positive, nargs=2, help="default: by the time of the layers")
    parser.add_argument("--keep-freed-memory", action="store_true",
                        help="reproduce/machine/allocator.py says why")  # fmt: skip
    options = parser.parse_args(arguments)
    if options.keep_freed_memory and arguments is None:
        keep_freed_memory()

    units = {"time": "s", GAIN: "1", "replay": "s", "replay if it waited": "s"}
    record = start(options, "gates.overlap", "what overlap gains", units, devices=2)
    collect(record, options.json, measure(options), options.rounds, table)


def measure(options: Namespace) -> Found:
    """Yield the results of all configurations after each round."""
    x = torch.randn(options.batch, *IMAGE)
    target = torch.randint(1000, (options.batch,))

    def layers() -> nn.Sequential:
        torch.manual_seed(0)
        return amoebanetd(*options.size)

    sample = x[: options.batch // 4]
    balance = list(options.balance or balance_by_time(2, layers(), sample, device="cpu", timeout=5.0))
    models = {"naive": on_cpu(layers(), balance, checkpoint="never")}
    alone: dict[str, Alone] = {}
    for m in options.chunks:
        how = {"chunks": m, "checkpoint": options.checkpoint}
        models[f"GPipe m={m}"] = on_cpu(layers(), balance, **how)
        alone[f"GPipe m={m}"] = Alone(on_cpu(layers(), balance, "graph", **how))
    turn = {way: partial(step, piped, x, target) for way, piped in models.items()}
    turn |= {f"{way}, each task alone": partial(step, one.model, x, target) for way, one in alone.items()}
    case = f"AmoebaNet-D {tuple(options.size)}, batch {options.batch}, balance {balance}, {options.checkpoint}"
    for samples in turns(turn, options.rounds, warm_up=WARM_UP):
        bounds = {way: _bounds(one.costs(), options.checkpoint) for way, one in alone.items()}
        gains = {way: [a / b for a, b in zip(samples["naive"], samples[way], strict=True)] for way in models}
        yield [
            Result(case, way, "measured", samples={"time": samples[way], GAIN: gains[way]}, values=bounds.get(way, {}))
            for way in models
        ]


def _bounds(costs: Costs, checkpoint: str) -> dict[str, float]:
    """Return the replayed step, and the one in which recomputation waits for its gradient."""
    bounds = {"replay": replay(costs).seconds}
    if checkpoint != "never":
        bounds["replay if it waited"] = replay(replace(costs, ahead=False)).seconds
    return bounds


COLUMNS = [
    Column[Result]("configuration", lambda result: result.row),
    Column[Result]("step s", lambda result: result.values["time"], "{:.3f}"),
    Column[Result]("quartiles", lambda result: result.values["spread"]["time"], "{0[0]:.3f}-{0[1]:.3f}"),
    Column[Result]("x naive", lambda result: result.values[GAIN], "{:.2f}"),
    Column[Result]("replay s", lambda result: result.values.get("replay"), "{:.3f}"),
    Column[Result]("reached", lambda result: result.values.get("replay", 0) / result.values["time"] or None, "{:.0%}"),
    Column[Result]("if it waited", lambda result: result.values.get("replay if it waited"), "{:.3f}"),
]


def table(record: Record, style: str = "simple") -> str:
    """Render medians, quartiles, speed-ups, the replay, and the share of it that is reached."""
    ((case, ways),) = by_case(record).items()
    made = layout.table(f"{case}, {ways['naive'].values['spread']['time'][-1]} rounds", COLUMNS, ways.values())
    return f"{made.title}\n\n{layout.grid(made.headings, made.rows, style)}"


if __name__ == "__main__":
    main()
