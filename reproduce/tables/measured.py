"""Find what this program has measured or emulated for the rows of published tables."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from reproduce.experiments.row import AS_PUBLISHED
from reproduce.numbers.metrics import throughput
from reproduce.records.places import MEASURED
from reproduce.records.record import Result, Run, ranked, readable


@dataclass(frozen=True)
class MeasuredRow:
    """What this program has measured or emulated for a row of a published table on one machine.

    Attributes:
        throughput: The samples per second of the median step.
        allocated: The peak of allocated bytes of each device, summed over the devices.
        disturbed: Whether other programs disturbed the measurement.
        how: Whether the row was measured, or emulated on one device.
    """

    throughput: float | None = None
    allocated: float | None = None
    disturbed: bool = False
    how: Literal["measured", "emulated"] = "measured"


Measured = dict[str, dict[str, MeasuredRow]]
"""Maps the name of a machine, and then the name of a published row, to what was measured."""


def measured_rows(experiment: str, folder: Path = MEASURED) -> Measured:
    """Return what this program has measured or emulated, on each machine, for published rows.

    If several records (files of results) of a machine have a row, a measured result is preferred to
    an emulated one. Among results of the same kind, the result in the best record is taken. The
    function `ranked` says which record is best.

    Args:
        experiment: The name of the experiment that reproduces the published rows.
        folder: The folder of the records.
    """
    found: Measured = {}
    for record in ranked(readable(folder), experiment):
        if record.run is None:
            continue
        for result in record.results:
            if result.experiment != experiment or not result.published:
                continue
            row = _measured(result)
            if row is None:
                continue
            rows = found.setdefault(machine_name(record.run), {})
            name = result.published.rpartition("/")[2]
            known = rows.get(name)
            if known is None or (known.how == "emulated" and row.how == "measured"):
                rows[name] = row
    return found


def machine_name(run: Run) -> str:
    """Return the name of a run's machine: the name of its CPU, or of the GPUs that the run used."""
    if run.device != "cuda":
        return run.machine.cpu
    return f"{run.devices} x {gpu_names(run)}"


def gpu_names(run: Run) -> str:
    """Return a text with the names of the GPUs that a run used, each name once."""
    names = dict.fromkeys(gpu.name for gpu in run.machine.gpus[: run.devices])
    return ", ".join(names)


def _measured(result: Result) -> MeasuredRow | None:
    """Return the numbers of a result, or None if the row did other work than the published row."""
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
    middle = None if speed is None else speed.middle
    allocated = sum(peaks) if peaks else None
    return MeasuredRow(middle, allocated, result.disturbed, status)
