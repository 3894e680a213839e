"""How far predictions for this machine are from its steps: for one CPU device and for two, in seconds and in bytes.

    python -m benchmarks.prediction --json results/benchmarks/prediction.json

The machine is calibrated first. Then seven models are trained as the papers compare: plainly, naively on two devices,
with checkpoints only, and by GPipe. Beside each step are two predictions: from operators, by the calibration, and from
a profile of the layers, as `plan` makes where no hardware is named. Beside each peak of memory is the predicted one.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from benchmarks.emulation import BALANCER
from benchmarks.emulation import MODELS as EMULATED
from benchmarks.harness import Found, by_case, command, keep, render, start, turns
from reproduce.machine.allocator import keep_freed_memory
from reproduce.machine.devices import Devices
from reproduce.predict.calibrate import calibrated
from reproduce.records.record import Record, Result
from reproduce.run.peak import measure_peak
from reproduce.run.timed import time_step
from reproduce.run.training import FakeData, Training
from torchgpipe.checkpoint import Mode
from torchgpipe.plan.count import count
from torchgpipe.plan.memory import setup_memory
from torchgpipe.plan.optimizer import optimizer_named
from torchgpipe.plan.predict import Predictor, Setup
from torchgpipe.plan.profiled import predictor_here

WAYS: dict[str, tuple[int, int, Mode]] = {
    "plain": (1, 1, "never"),
    "naive, n=2": (2, 1, "never"),
    "checkpoint-only, m=4": (1, 4, "always"),
    "GPipe, n=2 m=4": (2, 4, "except_last"),
}
"""Partitions, micro-batches, and what is recomputed."""
BASE = EMULATED["MLP"][0]
MODELS = {name: rows[0] for name, rows in EMULATED.items()} | {
    name: replace(BASE, model=name, input_shape=(3, 32, 32), batch_size=32) for name in ("VGG-like", "residual")
}
DEVICES = Devices("cpu", 2, threads=1)
PREDICTED = ("calibrated", "profiled")


def main(arguments: Sequence[str] | None = None) -> None:
    """Calibrate, measure, predict and print a table."""
    options = command("prediction", __doc__, rounds=7).parse_args(arguments)
    if arguments is None:
        keep_freed_memory()
    units = {"time": "s", **dict.fromkeys(PREDICTED, "s"), "peak": "bytes", "predicted_peak": "bytes"}
    record = start(options, "prediction", "steps and memory, predicted and measured", units, devices=DEVICES.count)
    keep(record, options.json, measure(options.rounds), len(MODELS), table)


def measure(rounds: int) -> Found:
    """Yield the results of each model."""
    hardware = calibrated(DEVICES)
    for case, base in MODELS.items():
        data = FakeData([base], 0)
        trainings = {
            way: Training(replace(base, name=way, partitions=n, chunks=m, checkpoint=mode), DEVICES, data, BALANCER, 0)
            for way, (n, m, mode) in WAYS.items()
        }
        layers, sample = base.build(), trainings["plain"].input
        counted = count(layers, sample, device="cpu")
        predictors = (Predictor(counted, hardware), predictor_here(layers, sample, counted, devices=DEVICES.count))
        steps = {way: partial(time_step, each, DEVICES) for way, each in trainings.items()}
        *_, samples = turns(steps, rounds, warm_up=1)
        results = []
        for way, training in trainings.items():
            row = training.row
            setup = Setup(row.batch_size, row.balance or (), row.chunks or 1, row.checkpoint or "never",
                          optimizer_named("sgd", foreach=False))  # fmt: skip
            # CPU devices share one memory, and what a partition hands on is not copied: only the sum has a meaning.
            values = {
                **{name: each.step(setup).seconds for name, each in zip(PREDICTED, predictors, strict=True)},
                "peak": sum(measure_peak(training, DEVICES, steps=2)["peak_allocated"]),
                "predicted_peak": sum(device.peak for device in setup_memory(counted, setup)),
            }
            times = [seconds for seconds, _ in samples[way]]
            results.append(Result(case, way, "measured", values=values, samples={"time": times}))
        yield results


def table(record: Record, style: str = "simple") -> str:
    """Render each step and peak, and how far predictions are from them; the medians at the end."""
    rows: list[list[str]] = []
    off: dict[str, list[list[float]]] = {}
    for case, ways in by_case(record).items():
        for way, result in ways.items():
            values, real = result.values, result.values["time"]
            errors = [values[name] / real - 1 for name in PREDICTED] + [values["predicted_peak"] / values["peak"] - 1]
            off.setdefault(way, []).append(errors)
            rows.append(_row(f"{case}, {way}", f"{1e3 * real:.0f}", f"{values['peak'] / 2**20:.1f}", errors, "+.1%"))
    for way, found in off.items():
        middle = [statistics.median(map(abs, series)) for series in zip(*found, strict=True)]
        rows.append(_row(f"median of {way}", "", "", middle, ".1%"))
    return render(["model", "measured ms", "by calibration", "by a profile", "peak MiB", "predicted"], rows, style)


def _row(name: str, time: str, peak: str, errors: Sequence[float], form: str) -> list[str]:
    calibrated, profiled, memory = (format(error, form) for error in errors)
    return [name, time, calibrated, profiled, peak, memory]


if __name__ == "__main__":
    main()
