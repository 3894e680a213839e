"""Make the table of how busy each device was: its share of a step, and the bubble of the pipeline as a whole."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from reproduce.experiments import Experiment
from reproduce.records.record import Result
from reproduce.tables.layout import Table, in_lines

__all__ = ["busy_cell", "busy_notes", "utilization_tables"]

MEANINGS = {
    "cpu": "busy: share of a step's time in which the device's worker was in a task",
    "cuda": "busy: GPU utilization as the driver (NVML) reports it, mean over some steps",
}


def utilization_tables(experiment: Experiment, results: Sequence[Result]) -> list[Table]:
    """Return the table of the rows that were watched; no table where none was."""
    rows = []
    for result in results:
        if "bubble" in result.values:
            each = in_lines([f"{share:.0%}" for share in result.values.get("utilization") or []])
            rows.append([result.row, each or "-", busy_cell(result) or "-", f"{result.values['bubble']:.0%}"])
    if not rows:
        return []
    notes = [
        *busy_notes(results),
        "bubble: share of the devices' time, from a step's first task to its last, in which they waited",
        "of one step of each row that was not timed, or of a few",
    ]
    headings = ("row", "each device", "mean", "bubble")
    return [Table(f"{experiment.title}: how busy the devices were", headings, rows, notes)]


def busy_cell(result: Result) -> str:
    """Return the mean utilization of a row's devices; nothing where it is not known."""
    found = result.values.get("utilization")
    return f"{statistics.mean(found):.0%}" if found else ""


def busy_notes(results: Iterable[Result]) -> list[str]:
    """Say what utilization is, where there is any."""
    devices = {result.device for result in results if result.values.get("utilization")}
    return [meaning for device, meaning in MEANINGS.items() if device in devices]
