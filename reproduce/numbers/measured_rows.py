"""Find the published rows that were measured: at paper scale, in the published configuration."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from reproduce.error import Error
from reproduce.experiments import AS_PUBLISHED
from reproduce.numbers.metrics import throughput
from reproduce.records.places import MEASURED
from reproduce.records.record import Result, Run, load


@dataclass(frozen=True)
class MeasuredRow:
    """A published row as measured: samples per second of a median step, and bytes allocated on all devices."""

    machine: str
    throughput: float | None = None
    allocated: float | None = None


def measured_rows(experiment: str, folder: Path = MEASURED) -> dict[str, MeasuredRow]:
    """Return each published row of the experiment that was measured, by the newest run that did."""
    records = []
    for path in sorted(folder.glob("*.json")):
        with contextlib.suppress(Error):  # `show` says what is wrong with it
            records.append(load(path))
    runs = [(record.run, record.results) for record in records if record.run is not None]
    rows = [
        (result.published, _row(result, run))
        for run, results in sorted(runs, key=lambda pair: pair[0].started)
        for result in results
        if result.experiment == experiment
    ]
    return {(name or "").rpartition("/")[2]: row for name, row in rows if row is not None}


def _row(result: Result, run: Run) -> MeasuredRow | None:
    if (result.status, result.scale, result.engine) != ("measured", "paper", "threads"):
        return None
    if not result.published or result.device == "meta":
        return None
    speed, peaks = throughput(result), result.values.get("peak_allocated")
    other = speed and result.config.get("configuration") != AS_PUBLISHED
    if other or not (speed or peaks):
        return None
    names = dict.fromkeys(gpu.name for gpu in run.machine.gpus[: run.devices])
    machine = f"{run.devices} x {', '.join(names)}" if run.device == "cuda" else run.machine.cpu
    return MeasuredRow(machine, speed.middle if speed else None, sum(peaks) if peaks else None)
