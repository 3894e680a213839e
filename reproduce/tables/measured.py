"""Find what was measured or emulated for the rows of published tables."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from reproduce.experiments.row import AS_PUBLISHED
from reproduce.numbers.metrics import throughput
from reproduce.records.places import MEASURED
from reproduce.records.record import Result, Run, ranked, readable


@dataclass(frozen=True)
class MeasuredRow:
    """What this program measured for a published row, or emulated on one device."""

    machine: str
    throughput: float | None = None  # the samples per second of the median step
    allocated: float | None = None  # the sum of all devices' peak bytes
    disturbed: bool = False  # whether other programs disturbed the measurement
    how: Literal["measured", "emulated"] = "measured"


Measured = dict[str, MeasuredRow]  # by the published row's name


def measured_rows(experiment: str, folder: Path = MEASURED) -> Measured:
    """Return what was measured or emulated for the published rows, by the row's name.

    If several records have a row, the first record in the order of `ranked` is used that measured
    it, or else the first one that emulated it. Other rows are left out.
    """
    found: Measured = {}
    # The records are read in reverse order. So the measurements of the first record are read last,
    # and replace those of other records.
    for record in reversed(ranked(readable(folder), experiment)):
        if record.run is None:
            continue
        for result in record.results:
            if result.experiment != experiment or not result.published:
                continue
            row = _measured(result, record.run)
            name = result.published.rpartition("/")[2]
            if row is None or (row.how == "emulated" and _is_measured(found.get(name))):
                continue
            found[name] = row
    return found


def _is_measured(row: MeasuredRow | None) -> bool:
    return row is not None and row.how == "measured"


def _measured(result: Result, run: Run) -> MeasuredRow | None:
    """Return what a result says of a published row, or None if it did other work than that row."""
    status = result.status
    if status not in ("measured", "emulated") or result.scale != "paper":
        return None
    if result.engine != "threads" or result.device == "meta":
        return None
    speed = throughput(result)
    peaks = None if status == "emulated" else result.values.get("peak_allocated")
    if speed is not None and result.config.get("configuration") != AS_PUBLISHED:
        return None
    if speed is None and not peaks:
        return None
    machine = run.machine.cpu
    if run.device == "cuda":
        names: dict[str, None] = {}
        for gpu in run.machine.gpus[: run.devices]:
            names[gpu.name] = None
        machine = f"{run.devices} x {', '.join(names)}"
    middle = None if speed is None else speed.middle
    allocated = sum(peaks) if peaks else None
    return MeasuredRow(machine, middle, allocated, result.disturbed, status)
