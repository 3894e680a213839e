"""Find the rows that were measured as published: at paper scale, in the published configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from reproduce.error import Error
from reproduce.experiments import AS_PUBLISHED
from reproduce.machine.description import ROOT
from reproduce.records.record import Record, Result, Run, load

__all__ = ["MEASURED", "MeasuredRow", "measured_rows"]

MEASURED = ROOT / "results" / "measured"


@dataclass(frozen=True)
class MeasuredRow:
    """A published row as measured: samples per second of a median step, and bytes allocated on all devices."""

    machine: str
    throughput: float | None = None
    allocated: float | None = None


def measured_rows(experiment: str, folder: Path = MEASURED) -> dict[str, MeasuredRow]:
    """Return each published row of the experiment that was measured, by the newest run that did."""
    found: dict[str, MeasuredRow] = {}
    for run, record in sorted(_records(folder), key=lambda pair: pair[0].started):
        for result in record.results:
            row = _row(result, _machine(run)) if result.experiment == experiment else None
            if row is not None:
                found[(result.published or "").rpartition("/")[2]] = row
    return found


def _records(folder: Path) -> Iterator[tuple[Run, Record]]:
    for path in sorted(folder.glob("*.json")):
        try:
            record = load(path)
        except Error:
            continue  # `show` tells what is wrong with it
        if record.run is not None:
            yield record.run, record


def _row(result: Result, machine: str) -> MeasuredRow | None:
    if result.status != "measured" or result.scale != "paper" or not result.published:
        return None
    times, peaks = result.samples.get("step_time"), result.values.get("peak_allocated")
    other = times and result.config.get("configuration") != AS_PUBLISHED
    if result.device == "meta" or other or not (times or peaks):
        return None
    return MeasuredRow(
        machine,
        throughput=result.config["batch_size"] / median(times) if times else None,
        allocated=sum(peaks) if peaks else None,
    )


def _machine(run: Run) -> str:
    if run.device != "cuda":
        return run.machine.cpu
    names = dict.fromkeys(gpu.name for gpu in run.machine.gpus[: run.devices])
    return f"{run.devices} x {', '.join(names)}"
