"""How far emulated steps can be trusted: emulated on one core, beside the same steps measured on two.

    python -m benchmarks.gates.emulation                      # five models, m = 1 to 32, all checkpoint modes, n = 2

An emulated step leaves out what two partitions at work do to each other: they share the machine's memory bandwidth and
the interpreter's lock, and hand tensors over. So every step is emulated twice: alone, as `python -m reproduce run` does
it, and by the clock while a second thread does the same. How much of a task overlaps with the other partition's decides
between the two times. A hand-over takes what it takes between partitions that do next to nothing. Workers watch each
partition's first micro-batch for random numbers, which takes time for every operator: how much is measured, too.
Everything takes turns, round by round. Beside it stands what `plan` predicts from a profile of the layers.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from benchmarks.harness import Found, by_case, command, keep, start
from reproduce.experiments import Optimizer, Row
from reproduce.machine.allocator import keep_freed_memory
from reproduce.machine.devices import Devices
from reproduce.records.record import Record, Result
from reproduce.run.emulation import Emulation, Executed
from reproduce.run.timed import time_step
from reproduce.run.training import Balancer, FakeData, Training
from reproduce.run.turns import turns
from reproduce.tables.layout import grid
from torchgpipe.engine.schedule import overlaps
from torchgpipe.plan.count.count import count
from torchgpipe.plan.hardware.here import hand_over
from torchgpipe.plan.predict import Predictor, Setup
from torchgpipe.plan.profiled import predictor_here
from torchgpipe.plan.replay import Costs, Timeline, replay
from torchgpipe.task.randomness import PrivateGenerator
from torchgpipe.tensors.checkpoint import Mode

WAYS = ("measured", "emulated", "with sharing")
PROFILES = 3  # the median of so many predictions counts
CHUNKS = (1, 2, 4, 8, 16, 32)
MODES: tuple[Mode, ...] = ("never", "except_last", "always")
SETTLED = 10
"""Replays after which tasks' times and overlaps hardly change."""
SGD = Optimizer(name="SGD", options={"lr": 0.01, "momentum": 0.0}, state=0)


class Attention(nn.TransformerEncoderLayer):
    """A layer of a transformer's encoder: (N, tokens, 64) to the same."""

    def __init__(self) -> None:
        super().__init__(64, nhead=4, dim_feedforward=256, dropout=0.0, batch_first=True)


def perceptron() -> nn.Sequential:
    """Build an MLP: (N, 512) to (N, 10)."""
    layers = [layer for _ in range(12) for layer in (nn.Linear(512, 512), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(512, 10))


def transformer() -> nn.Sequential:
    """Build a transformer's encoder that classifies: (N, 64, 64) to (N, 10)."""
    return nn.Sequential(*(Attention() for _ in range(8)), nn.Flatten(), nn.Linear(64 * 64, 10))


OWN = {"MLP": perceptron, "Transformer": transformer}


@dataclass(frozen=True, kw_only=True)
class OwnRow(Row):
    """A row whose model may be one of `OWN`."""

    def build(self) -> nn.Sequential:
        """Build the model, without random masks: two threads cannot draw from one generator under checkpointing."""
        model = OWN[self.model]() if self.model in OWN else super().build()
        for layer in model.modules():
            if isinstance(layer, (nn.Dropout, nn.Dropout2d)):
                layer.eval()
        return model


def _rows(model: str, size: tuple[int, ...], shape: tuple[int, ...], batch_size: int, classes: int | None = 10,
          **changes: object) -> list[OwnRow]:  # fmt: skip
    base = OwnRow(model=model, size=size, input_shape=shape, batch_size=batch_size, partitions=2, num_classes=classes,
                  optimizer=SGD, loss="cross_entropy", equal="batch")  # fmt: skip
    return [
        replace(base, name=f"m={m} {mode}", chunks=m, checkpoint=mode, **changes)  # type: ignore[arg-type]
        for m in CHUNKS
        for mode in MODES
    ]


U_NET = {"options": {"output_channels": 1}, "loss": "binary_cross_entropy_with_logits"}
MODELS = {
    "AmoebaNet-D (3, 16)": _rows("AmoebaNet-D", (3, 16), (3, 224, 224), 32),
    "U-Net (2, 16)": _rows("U-Net", (2, 16), (3, 64, 64), 32, None, **U_NET),
    "thin ResNet-101": _rows("thin ResNet-101", (16, 1), (3, 64, 64), 32),
    "MLP": _rows("MLP", (), (512,), 2048),
    "Transformer": _rows("Transformer", (), (64, 64), 64),
}


class Subject:
    """One configuration: the steps that are measured, and those that are emulated."""

    def __init__(self, row: OwnRow, hand_over: float = 0.0) -> None:
        devices = Devices("cpu", 2, threads=1)
        data, balancer = FakeData([row], 0), BALANCER
        self.training = Training(row, devices, data, balancer, 0)
        self.plain = row.build()
        row = replace(row, balance=self.training.row.balance)
        self.emulation, self.other = (Emulation(row, devices, data, balancer, 0) for _ in range(2))
        self.hand_over, self.devices, self.row = hand_over, devices, row

    def run(self) -> tuple[float, Executed, Executed, float]:
        """Return the seconds of a measured step, its tasks run alone and beside another thread, and `watching`."""
        measured, _ = time_step(self.training, self.devices)
        alone = self.emulation.run()
        with _beside(self.other):
            beside = self.emulation.run(wall=True)
        return measured, alone, beside, self.watching()

    def watching(self) -> float:
        """Return how many times longer a micro-batch's forward takes where it is watched for random numbers."""
        x, seconds = self.training.input[: self.row.micro_batch_size], []
        for watched in (nullcontext(), PrivateGenerator(0, lambda: None)):
            started = time.thread_time()
            with watched:
                self.plain(x)
            seconds.append(time.thread_time() - started)
        return seconds[1] / seconds[0]

    def seconds(self, runs: Sequence[tuple[float, Executed, Executed, float]]) -> dict[str, list[float]]:
        """Return the seconds of every step: measured, emulated, and emulated with sharing."""
        measured, alone, beside, watching = (list(series) for series in zip(*runs, strict=True))
        step, slow = self.emulation.step(alone), self.emulation.step(beside)
        # On CPU devices one thread updates all partitions, one after another.
        updates = self.row.devices * step.update
        emulated = step.seconds - step.update + updates
        longer = statistics.median(watching)
        shared = settled(watched(step.costs, longer), watched(slow.costs, longer), self.hand_over).seconds + updates
        speeds = [run.work / step.work for run in alone]
        found = (measured, [emulated * each for each in speeds], [shared * each for each in speeds])
        return {name: [round(each, 6) for each in series] for name, series in zip(WAYS, found, strict=True)}

    def planned(self, predictor: Predictor) -> float:
        """Return what `plan` predicts of the step."""
        row = self.row
        setup = Setup(row.batch_size, row.balance or (), row.chunks or 1, row.checkpoint or "never")
        return predictor.step(setup).seconds


BALANCER = Balancer(Devices("cpu", 2, threads=1))


@contextmanager
def _beside(other: Emulation) -> Iterator[None]:
    """Keep another core at work on the same."""
    over = threading.Event()

    def work() -> None:
        torch.set_num_threads(1)
        while not over.is_set():
            other.run()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def watched(costs: Costs, longer: float) -> Costs:
    """Let the first micro-batch's forward take so many times longer, where workers run it."""
    first, *others = costs.forward
    return replace(costs, forward=[[longer * each for each in first], *others]) if others else costs


def settled(alone: Costs, shared: Costs, hand_over: float) -> Timeline:
    """Replay tasks that take longer while the other partition works, by the share of their time in which it does.

    How long tasks take and when they overlap depend on each other; a few replays settle both.
    """
    tables = ("forward", "backward", "recompute")
    together = overlaps(len(alone.forward), len(alone.forward[0]))
    copied: dict[str, Any] = {name: [list(row) for row in getattr(alone, name)] for name in tables}
    now = replace(alone, **copied, copy=hand_over if together else 0.0)
    timeline = replay(now)
    for _ in range(SETTLED):
        for event in timeline.tasks:
            i, j = event.micro_batch, event.partition
            share = _overlap(timeline, j, event.start, event.end)
            own, both = (getattr(costs, event.kind)[i][j] for costs in (alone, shared))
            getattr(now, event.kind)[i][j] = own + share * max(0.0, both - own)
        timeline = replay(now)
    return timeline


def _overlap(timeline: Timeline, partition: int, start: float, end: float) -> float:
    """Return the share of the time from `start` to `end` in which another partition works."""
    if end <= start:
        return 0.0
    others = (e for e in timeline.tasks if e.partition != partition)
    return min(1.0, sum(max(0.0, min(end, e.end) - max(start, e.start)) for e in others) / (end - start))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, emulate and print a table."""
    options = command("emulation", __doc__, rounds=7).parse_args(arguments)
    if arguments is None:
        keep_freed_memory()
    units = dict.fromkeys((*WAYS, "planned", "hand_over"), "s")
    record = start(options, "emulation", "steps, emulated and measured", units, devices=2)
    keep(record, options.json, measure(options.rounds), len(MODELS), table)


def measure(rounds: int) -> Found:
    """Yield the results of each model."""
    hand = hand_over()
    for case, rows in MODELS.items():
        subjects = {row.name: Subject(row, hand) for row in rows}
        first = next(iter(subjects.values())).training
        layers = rows[0].build()
        counted = count(layers, first.input)
        predictors = [predictor_here(layers, first.input, counted, devices=2) for _ in range(PROFILES)]
        *_, samples = turns({name: subject.run for name, subject in subjects.items()}, rounds, warm_up=1)
        yield [
            Result(case, way, "measured", config={"balance": list(subjects[way].row.balance or ())},
                   values={"hand_over": hand},
                   samples={**subjects[way].seconds(runs),
                            "planned": [subjects[way].planned(each) for each in predictors]})
            for way, runs in samples.items()
        ]  # fmt: skip


def errors(record: Record) -> dict[str, dict[str, float]]:
    """Return by how much each way is off the measured seconds, by case and configuration, as a share of these."""
    found = {}
    for case, ways in by_case(record).items():
        for way, result in ways.items():
            middle = {name: result.values[name] for name in WAYS} | {"as plan predicts": result.values["planned"]}
            real = middle.pop("measured")
            found[f"{case} {way}"] = {name: x / real - 1 for name, x in middle.items()}
    return found


def table(record: Record, style: str = "simple") -> str:
    """Render the errors of each configuration, and their medians and largest."""
    found = errors(record)
    ways = list(next(iter(found.values())))
    results = {f"{each.experiment} {each.row}": each for each in record.results}
    rows = [
        [name, f"{1e3 * results[name].values['measured']:.0f}", *(f"{x:+.1%}" for x in each.values())]
        for name, each in found.items()
    ]
    for what, of in (("median", statistics.median), ("largest", max)):
        columns = [[abs(each[way]) for each in found.values()] for way in ways]
        rows.append([f"{what}, either way", "", *(f"{of(column):.1%}" for column in columns)])
    rounds = min(each.values["spread"]["measured"][-1] for each in record.results)
    hand_over = record.results[0].values["hand_over"]
    head = f"{len(found)} configurations of n=2, {rounds} rounds; a hand-over takes {hand_over * 1e6:.0f} us"
    return f"{head}\n\n{grid(['configuration', 'measured ms', *ways], rows, style)}"


if __name__ == "__main__":
    main()
