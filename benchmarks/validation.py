"""How well steps are predicted from a profile: layers timed here and replayed, beside steps measured here.

    python -m benchmarks.validation                     # AmoebaNet-D and U-Net, one core per device, n = 1 and 2

In every round each model's layers are profiled for each size of micro-batch, and each configuration runs one step, in
turns, so that a drift of the machine's speed meets all of them. A prediction replays the layers' medians; nothing of a
pipeline's step goes into it. `torchgpipe.plan.timing` says how layers are timed, `benchmarks.sharing` how partitions
slow each other down. Beside it stands what `plan` predicts, which profiles anew in every round, as it does for a user.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.harness import Found, by_case, command, keep, render, start, turns
from benchmarks.pipelines import on_cpu
from benchmarks.sharing import CPU, busy, replayed
from reproduce.machine.allocator import keep_freed_memory
from reproduce.models import amoebanetd, unet
from reproduce.records.record import Record, Result
from torchgpipe.balance.minimise import minimise_heaviest
from torchgpipe.checkpoint import Mode
from torchgpipe.observe import Task
from torchgpipe.plan.count import count
from torchgpipe.plan.optimizer import Optimizer
from torchgpipe.plan.predict import Setup
from torchgpipe.plan.profiled import predictor_here
from torchgpipe.plan.replay import Timeline
from torchgpipe.plan.timing import Seconds, time_step

KINDS = Seconds._fields
NO_OPTIMIZER = Optimizer(updates=False)
WARM_UP = 2  # steps: the first starts the workers
TARGET = 0.10
"""The median error that is aimed at."""


class Model(NamedTuple):
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

    def result(self, case: str, way: str, planned: Sequence[float]) -> Result:
        """Return what was run and every sample, to the microsecond."""
        return Result(
            case,
            way,
            "measured",
            config={
                "batch_size": self.setup.batch_size,
                "balance": list(self.setup.balance),
                "chunks": self.setup.chunks,
                "checkpoint": self.setup.checkpoint,
            },
            samples={"time": _rounded(self.seconds), "planned": _rounded(planned)},
            values={"trace": [[*event[:3], *_rounded(event[3:])] for event in self.trace]},
        )


def _rounded(seconds: Sequence[float]) -> list[float]:
    return [round(t, 6) for t in seconds]


class Subject:
    """One model under validation: its profiles by the micro-batch's size, and its configurations."""

    def __init__(self, name: str) -> None:
        self.name, model = name, MODELS[name]
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

    def results(self) -> list[Result]:
        """Return every sample, in seconds to the microsecond: a result for each size's profiles, and each pipeline."""
        profiles = [
            Result(self.name, f"profile of {size}", "measured", config={"size": size}, values={
                how: {kind: [_rounded(getattr(one, kind)) for one in rounds] for kind in KINDS}
                for how, rounds in by_how.items()
            })
            for size, by_how in self.profiles.items()
        ]  # fmt: skip
        return profiles + [one.result(self.name, way, self.planned[way]) for way, one in self.pipelines.items()]


def main(arguments: Sequence[str] | None = None) -> None:
    """Profile, measure and print a table."""
    options = command("validation", __doc__, rounds=9).parse_args(arguments)
    if arguments is None:
        keep_freed_memory()
    units = dict.fromkeys(("time", "planned", "trace", "alone", "shared"), "s")
    record = start(options, "validation", "steps, predicted and real", units, devices=2)
    keep(record, options.json, measure(options.rounds), options.rounds, table)


def measure(rounds: int) -> Found:
    """Yield all results after each round."""
    subjects = {name: Subject(name) for name in MODELS}
    for _ in turns({name: subject.round for name, subject in subjects.items()}, rounds):
        yield [result for subject in subjects.values() for result in subject.results()]


def predictions(record: Record, *, sharing: bool = True) -> dict[str, tuple[Timeline, Result]]:
    """Return each configuration's predicted step, and the measured ones.

    Without `sharing`, partitions do not slow each other down.
    """
    found = {}
    for case, ways in by_case(record).items():
        profiles = {one.config["size"]: one.values for one in ways.values() if "size" in one.config}
        for way, one in ways.items():
            if "size" not in one.config:
                config = one.config
                setup = Setup(config["batch_size"], tuple(config["balance"]), config["chunks"], config["checkpoint"])
                by_how = profiles[setup.sizes[0]]
                alone, shared = _medians(by_how["alone"]), _medians(by_how["shared" if sharing else "alone"])
                found[f"{case} {way}"] = replayed(alone, shared, setup), one
    return found


def _medians(rounds: dict[str, list[list[float]]]) -> Seconds:
    return Seconds(*([statistics.median(times) for times in zip(*rounds[kind], strict=True)] for kind in KINDS))


def table(record: Record, style: str = "simple") -> str:
    """Render predicted beside measured steps, and the median error beside its target."""
    found, apart = predictions(record), predictions(record, sharing=False)
    real = {name: statistics.median(one.samples["time"]) for name, (_, one) in found.items()}
    columns = {
        "error": {name: timeline.seconds for name, (timeline, _) in found.items()},
        "without sharing": {name: timeline.seconds for name, (timeline, _) in apart.items()},
        "as plan predicts": {
            name: statistics.median(one.samples["planned"])
            for name, (_, one) in found.items()
            if "planned" in one.samples
        },
    }
    columns = {heading: column for heading, column in columns.items() if column}
    errors = [[column[name] / seconds - 1 for name, seconds in real.items()] for column in columns.values()]
    rows = [
        [name, f"{timeline.seconds * 1e3:.0f}", f"{real[name] * 1e3:.0f}", *(f"{error:+.1%}" for error in each)]
        for (name, (timeline, _)), *each in zip(found.items(), *errors, strict=True)
    ]
    medians = [f"{statistics.median(map(abs, column)):.1%}" for column in errors]
    rows.append([f"median error, either way (target: {TARGET:.0%})", "", "", *medians])
    rounds = min(len(one.samples["time"]) for _, one in found.values())
    body = render(["configuration", "predicted ms", "measured ms", *columns], rows, style)
    return f"{len(found)} configurations, {rounds} rounds\n\n{body}"


if __name__ == "__main__":
    main()
