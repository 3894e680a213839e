"""How well steps are predicted from a profile: layers timed here and replayed, beside steps measured here.

    python -m benchmarks.validation                     # AmoebaNet-D and U-Net, one core per device, n = 1 and 2

In every round each model's layers are profiled for each size of micro-batch, and each configuration runs one step, in
turns, so that a drift of the machine's speed meets all of them. A prediction replays the layers' medians; nothing of a
pipeline's step goes into it. `torchgpipe.plan.timing` says how layers are timed, `benchmarks.sharing` how partitions
slow each other down. Beside it stands what `plan` predicts, which profiles anew in every round, as it does for a user.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.circumstances import circumstances, keep
from benchmarks.pipelines import on_cpu
from benchmarks.sharing import CPU, busy, replayed
from reproduce.machine.allocator import keep_freed_memory
from reproduce.models import amoebanetd, unet
from torchgpipe.balance.minimise import minimise_heaviest
from torchgpipe.checkpoint import Mode
from torchgpipe.observe import Task
from torchgpipe.plan.count import count
from torchgpipe.plan.optimizer import Optimizer
from torchgpipe.plan.predict import Setup
from torchgpipe.plan.profiled import predictor_here
from torchgpipe.plan.replay import Timeline
from torchgpipe.plan.timing import Seconds, time_step

__all__ = ["MODELS", "SETUPS", "main", "planned", "predictions", "table"]

KINDS = Seconds._fields
NO_OPTIMIZER = Optimizer(updates=False)
WARM_UP = 2  # steps: the first starts the workers
TARGET = 0.10
"""The median error that is aimed at."""


@dataclass(frozen=True)
class Model:
    """A model to validate with, an input's shape, and the samples of a mini-batch."""

    build: Callable[[], nn.Sequential]
    shape: tuple[int, ...]
    batch_size: int


MODELS = {
    "AmoebaNet-D (3, 16)": Model(lambda: amoebanetd(3, 16), (3, 224, 224), 8),
    "U-Net (2, 8)": Model(lambda: unet(3, 2, 8), (3, 96, 96), 16),
}
SETUPS: tuple[tuple[int, int, Mode], ...] = (
    (1, 4, "never"), (1, 4, "except_last"), (1, 4, "always"), (2, 1, "never"), (2, 1, "always"), (2, 2, "never"),
    (2, 2, "except_last"), (2, 2, "always"), (2, 4, "never"), (2, 4, "except_last"), (2, 4, "always"),
)  # fmt: skip
"""Partitions, micro-batches, checkpointing."""


class Pipeline:
    """One configuration under validation: its steps' seconds, and the tasks of the last one."""

    def __init__(self, model: nn.Sequential, setup: Setup) -> None:
        self.setup = setup
        self.gpipe = on_cpu(model, setup.balance, chunks=setup.chunks, checkpoint=setup.checkpoint)
        self.gpipe.observer = self._clock
        self.seconds: list[float] = []
        self.trace: list[tuple[str, int, int, float, float]] = []
        """Kind, micro-batch, partition, and the start and end in seconds since the step began."""

    def step(self, x: Tensor) -> None:
        """Run one step, forward and backward."""
        self.trace.clear()
        self._start = perf_counter()
        output = self.gpipe(x)
        output.backward(torch.ones_like(output))
        self.seconds.append(perf_counter() - self._start)
        self.gpipe.zero_grad()

    @contextmanager
    def _clock(self, task: Task) -> Iterator[None]:
        start = perf_counter() - self._start
        yield
        self.trace.append((task.kind, task.micro_batch, task.partition, start, perf_counter() - self._start))

    def result(self) -> dict[str, Any]:
        """Return what was run and every sample, to the microsecond."""
        return {
            "batch_size": self.setup.batch_size,
            "balance": list(self.setup.balance),
            "chunks": self.setup.chunks,
            "checkpoint": self.setup.checkpoint,
            "seconds": [round(t, 6) for t in self.seconds],
            "trace": [[*task, round(start, 6), round(end, 6)] for *task, start, end in self.trace],
        }


class Subject:
    """One model under validation: its profiles by the micro-batch's size, and its configurations."""

    def __init__(self, name: str) -> None:
        model = MODELS[name]
        torch.manual_seed(0)
        self.layers, self.double = model.build(), model.build()
        self.x = torch.rand(model.batch_size, *model.shape)
        self.counts = count(self.layers, self.x)
        self.profiles: dict[int, dict[str, list[Seconds]]] = {}
        self.planned: dict[str, list[float]] = {}
        self.pipelines: dict[str, Pipeline] = {}
        for n, m, mode in SETUPS:
            setup = Setup(model.batch_size, (len(self.layers),), m, mode, NO_OPTIMIZER)
            _, warm = (time_step(self.layers, self.x[: setup.sizes[0]], CPU) for _ in range(2))
            costs = [f + b for f, b in zip(warm.graph, warm.backward, strict=True)]
            setup = replace(setup, balance=tuple(minimise_heaviest(costs, n)))
            self.pipelines[f"n={n} m={m} {mode}"] = made = Pipeline(model.build(), setup)
            for _ in range(WARM_UP):
                made.step(self.x)
            made.seconds.clear()

    def round(self) -> None:
        """Profile for every size of micro-batch, and run a step of every configuration with micro-batches of that."""
        for size in sorted({pipeline.setup.sizes[0] for pipeline in self.pipelines.values()}):
            sample = self.x[:size]
            found = self.profiles.setdefault(size, {"alone": [], "shared": []})
            found["alone"].append(time_step(self.layers, sample, CPU))
            with busy(self.double, sample):
                found["shared"].append(time_step(self.layers, sample, CPU))
            for pipeline in self.pipelines.values():
                if pipeline.setup.sizes[0] == size:
                    pipeline.step(self.x)
        predictor = predictor_here(self.layers, self.x, self.counts, devices=max(n for n, _, _ in SETUPS))
        for name, pipeline in self.pipelines.items():
            self.planned.setdefault(name, []).append(predictor.step(pipeline.setup).seconds)

    def result(self) -> dict[str, Any]:
        """Return every sample, in seconds to the microsecond."""

        def rounds(profiles: Sequence[Seconds], kind: str) -> list[list[float]]:
            return [[round(t, 6) for t in getattr(one, kind)] for one in profiles]

        return {
            "profiles": {
                str(size): {how: {kind: rounds(profiles, kind) for kind in KINDS} for how, profiles in by_how.items()}
                for size, by_how in self.profiles.items()
            },
            "configurations": {
                name: {**pipeline.result(), "planned": [round(t, 6) for t in self.planned[name]]}
                for name, pipeline in self.pipelines.items()
            },
        }


def main(arguments: Sequence[str] | None = None) -> None:
    """Profile, measure and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.validation", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="how often everything takes its turn (default 9)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample to FILE")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")

    if arguments is None:
        keep_freed_memory()
    under = circumstances()
    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    try:
        subjects = {name: Subject(name) for name in MODELS}
        for k in range(options.rounds):
            for subject in subjects.values():
                subject.round()
            print(f"\rround {k + 1} of {options.rounds}", end="", file=sys.stderr, flush=True)
            result = {"models": {name: subject.result() for name, subject in subjects.items()}}
            if options.json is not None:
                keep(options.json, "validation", under, result)  # nothing that is finished is lost
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        print(file=sys.stderr)
    print(table(result))


def predictions(result: dict[str, Any], *, sharing: bool = True) -> dict[str, tuple[Timeline, float]]:
    """Return each configuration's predicted step, and the median of its measured seconds.

    Without `sharing`, partitions do not slow each other down.
    """
    found = {}
    for name, model in result["models"].items():
        for which, one in model["configurations"].items():
            setup = Setup(one["batch_size"], tuple(one["balance"]), one["chunks"], one["checkpoint"])
            by_how = model["profiles"][str(setup.sizes[0])]
            alone, shared = _medians(by_how["alone"]), _medians(by_how["shared" if sharing else "alone"])
            found[f"{name} {which}"] = replayed(alone, shared, setup), statistics.median(one["seconds"])
    return found


def planned(result: dict[str, Any]) -> dict[str, float]:
    """Return the median of what `plan` predicts for each configuration, where a record has it."""
    return {
        f"{name} {which}": statistics.median(one["planned"])
        for name, model in result["models"].items()
        for which, one in model["configurations"].items()
        if "planned" in one
    }


def _medians(rounds: dict[str, list[list[float]]]) -> Seconds:
    return Seconds(*([statistics.median(times) for times in zip(*rounds[kind], strict=True)] for kind in KINDS))


def table(result: dict[str, Any], style: str = "simple") -> str:
    """Render predicted beside measured steps, and the median error beside its target."""
    from tabulate import tabulate

    found, apart = predictions(result), predictions(result, sharing=False)
    columns = {
        "error": {name: timeline.seconds for name, (timeline, _) in found.items()},
        "without sharing": {name: timeline.seconds for name, (timeline, _) in apart.items()},
        "as plan predicts": planned(result),
    }
    columns = {heading: column for heading, column in columns.items() if column}
    errors = [[column[name] / measured - 1 for name, (_, measured) in found.items()] for column in columns.values()]
    rows = [
        [name, f"{timeline.seconds * 1e3:.0f}", f"{measured * 1e3:.0f}", *(f"{error:+.1%}" for error in pair)]
        for (name, (timeline, measured)), *pair in zip(found.items(), *errors, strict=True)
    ]
    medians = [f"{statistics.median(map(abs, column)):.1%}" for column in errors]
    rows.append([f"median error, either way (target: {TARGET:.0%})", "", "", *medians])
    headers = ["configuration", "predicted ms", "measured ms", *columns]
    rounds = min(len(one["seconds"]) for model in result["models"].values() for one in model["configurations"].values())
    body = tabulate(rows, headers=headers, disable_numparse=True, tablefmt=style)
    return f"{len(found)} configurations, {rounds} rounds\n\n{body}"


if __name__ == "__main__":
    main()
