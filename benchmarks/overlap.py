"""How much pipelining gains on CPU: naive model parallelism, this pipeline, PyTorch's ScheduleGPipe, and the replay.

    python -m benchmarks.overlap                        # AmoebaNet-D (6, 64), batch 32, n = 2, one core per device
    python -m benchmarks.overlap --keep-freed-memory    # without taking memory from the system anew in every step

All configurations take turns, one training step each per round, so that a drift of the machine's speed meets all
of them. A speed-up is the median over rounds of naive's time by the configuration's, and likewise of `ScheduleGPipe`'s
with as many micro-batches: two processes linked by gloo, where this pipeline is one process with a thread per
partition. The replay is what the schedule allows with the partitions' own task times: medians over the same rounds,
each task measured with nothing else running. Where recomputation starts before its gradient arrives, it hides in the
bubble; "if it waited" is the replay without that.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.circumstances import circumstances, keep
from benchmarks.overlap_rank import ScheduleGPipe
from benchmarks.pipelines import on_cpu
from reproduce.machine.allocator import keep_freed_memory
from reproduce.models import amoebanetd
from torchgpipe import GPipe
from torchgpipe.balance import balance_by_time
from torchgpipe.observe import Task
from torchgpipe.plan.replay import Costs, replay

IMAGE = (3, 224, 224)
WARM_UP = 2  # rounds: the first starts the workers


def step(model: Callable[[Tensor], Tensor], x: Tensor, target: Tensor) -> float:
    """Run one step without an optimizer; return its seconds."""
    began = time.perf_counter()
    if isinstance(model, nn.Module):
        model.zero_grad()
    nn.functional.cross_entropy(model(x), target).backward()
    return time.perf_counter() - began


class Alone:
    """Measure every task of `model` with nothing else running: the graph engine runs one at a time on a CPU."""

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
        """Return each task's median, without the first step, which warms up."""
        m, n = 1 + max(task.micro_batch for task in self.times), len(self.model.partitions)

        def table(kind: str) -> list[list[float]]:
            return [
                [statistics.median(self.times.get(Task(kind, i, j), [0.0, 0.0])[1:]) for j in range(n)]  # type: ignore[arg-type]
                for i in range(m)
            ]

        return Costs(table("forward"), table("backward"), table("recompute"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap", description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, nargs=2, default=(6, 64), metavar=("L", "D"))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--chunks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--checkpoint", default="never", choices=["never", "except_last", "always"])
    parser.add_argument("--balance", type=int, nargs=2, default=None, help="default: by the time of the layers")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--keep-freed-memory", action="store_true",
                        help="in all processes; reproduce/machine/allocator.py says why")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample to FILE")
    options = parser.parse_args(arguments)
    if options.keep_freed_memory:
        keep_freed_memory()

    under = circumstances()
    torch.set_num_threads(1)
    x = torch.randn(options.batch, *IMAGE)
    target = torch.randint(1000, (options.batch,))

    def layers() -> nn.Sequential:
        torch.manual_seed(0)
        return amoebanetd(*options.size)

    balance = options.balance or balance_by_time(2, layers(), x[: options.batch // 4], device="cpu", timeout=5.0)
    models: dict[str, Callable[[Tensor], Tensor]] = {"naive": on_cpu(layers(), balance, checkpoint="never")}
    alone: dict[str, Alone] = {}
    schedules: dict[str, ScheduleGPipe] = {}
    for m in options.chunks:
        how = {"chunks": m, "checkpoint": options.checkpoint}
        models[f"GPipe m={m}"] = on_cpu(layers(), balance, **how)
        alone[f"GPipe m={m}"] = Alone(on_cpu(layers(), balance, "graph", **how))
        if options.checkpoint == "never":  # it knows no checkpointing
            schedules[f"ScheduleGPipe m={m}"] = ScheduleGPipe(options.size, balance, options.batch, m)

    samples: dict[str, list[float]] = {name: [] for name in (*models, *schedules)}
    try:
        for k in range(-WARM_UP, options.rounds):
            for name, model in models.items():
                seconds = step(model, x, target)
                if k >= 0:
                    samples[name].append(seconds)
            for one in alone.values():
                step(one.model, x, target)
            for name, schedule in schedules.items():
                seconds = schedule.step()
                if k >= 0:
                    samples[name].append(seconds)
            print(f"\rround {max(0, k + 1)} of {options.rounds}", end="", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except subprocess.SubprocessError as error:
        raise SystemExit(f"overlap: stopped ({type(error).__name__})") from None
    finally:
        for schedule in schedules.values():
            schedule.close()
        print(file=sys.stderr)

    costs = {name: one.costs() for name, one in alone.items()}
    never = options.checkpoint == "never"
    result = {
        "what": f"AmoebaNet-D {tuple(options.size)}, batch {options.batch}, balance {list(balance)}, "
        f"{options.checkpoint}",
        "replay": {name: replay(cost).seconds for name, cost in costs.items()},
        "replay if it waited": {
            name: replay(replace(cost, ahead=False)).seconds for name, cost in costs.items() if not never
        },
        "seconds": samples,
    }
    print(table(result))
    if options.json is not None:
        keep(options.json, "overlap", under, result)


def table(result: dict[str, Any], style: str = "simple") -> str:
    """Render medians, quartiles, and medians of the rounds' ratios; of the replay, how much is reached."""
    from tabulate import tabulate

    samples, bounds, waited = result["seconds"], result["replay"], result["replay if it waited"]

    def gained(over: str, name: str) -> str:
        return f"{statistics.median(a / b for a, b in zip(samples[over], samples[name], strict=True)):.2f}"

    rows = []
    for name, seconds in samples.items():
        low, median, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [seconds[0]] * 3
        theirs = f"Schedule{name}"
        bound = f"{bounds[name]:.3f}" if name in bounds else ""
        reached = f"{bounds[name] / median:.0%}" if name in bounds else ""
        row = {"configuration": name, "step s": f"{median:.3f}", "quartiles": f"{low:.3f}-{high:.3f}",
               "x naive": gained("naive", name),
               "x ScheduleGPipe": gained(theirs, name) if theirs in samples else "",
               "replay s": bound, "reached": reached,
               "if it waited": f"{waited[name]:.3f}" if name in waited else ""}  # fmt: skip
        rows.append(row)
    for column in ("x ScheduleGPipe", "if it waited"):
        if not any(row[column] for row in rows):
            for row in rows:
                del row[column]
    body = tabulate(rows, headers="keys", disable_numparse=True, tablefmt=style)
    return f"{result['what']}, {len(samples['naive'])} rounds\n\n{body}"


if __name__ == "__main__":
    main()
