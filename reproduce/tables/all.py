"""Make tables from records: what was measured, with what was published beside it, and how far the two compare."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from reproduce.experiments import EXPERIMENTS
from reproduce.numbers.as_published import measured_rows
from reproduce.records.record import FREED_MEMORY, Record, Result, Run
from reproduce.tables.ablation import ablation_tables
from reproduce.tables.accuracy import accuracy_tables
from reproduce.tables.layout import Table, many
from reproduce.tables.memory import memory_tables
from reproduce.tables.predicted import predicted_tables
from reproduce.tables.speed import speed_tables

__all__ = ["document", "tables"]

MAKERS: dict[str, Any] = {
    "speed": speed_tables,
    "memory": memory_tables,
    "ablation": ablation_tables,
    "accuracy": accuracy_tables,
}


def tables(record: Record, experiment: str | None = None) -> list[Table]:
    """Return the tables of every experiment in the record, or of one."""
    if record.kind == "predicted":
        return predicted_tables(record, measured_rows(record.results[0].experiment))
    by_experiment: dict[str, list[Result]] = {}
    for result in record.results:
        by_experiment.setdefault(result.experiment, []).append(result)
    made: list[Table] = []
    for name, results in by_experiment.items():
        if name in EXPERIMENTS and experiment in (None, name):
            measures = EXPERIMENTS[name].measures
            found = MAKERS[measures](EXPERIMENTS[name], results)
            busy = busy_note(record.run) if measures != "memory" else None
            made.extend(found if busy is None else [replace(table, notes=[*table.notes, busy]) for table in found])
    return made


def busy_note(run: Run | None) -> str | None:
    """Warn where other programs kept the CPU busy as a run on it began, by more than a quarter of its cores."""
    if run is None or run.device != "cpu" or run.load is None or run.load[0] <= run.machine.cores / 4:
        return None
    return f"the machine was busy: load {run.load[0]:.2f} on {many(run.machine.cores, 'core')} before the start"


def document(record: Record) -> str:
    """Return the record as a Markdown page: its tables, and the circumstances they were made under."""
    parts = [f"# {record.title}"]
    if record.run is not None:
        parts.append("\n".join(f"- {fact}" for fact in facts(record)))
    parts.extend(table.markdown() for table in tables(record))
    return "\n\n".join(parts) + "\n"


def facts(record: Record) -> Sequence[str]:
    """Return what there is to know about a run, a line each."""
    run = record.run
    assert run is not None
    machine = run.machine
    threads = "" if run.threads_per_device is None else f" of {run.threads_per_device} thread(s)"
    gpus = "".join(f", {gpu.name} ({gpu.memory / 2**30:.0f} GiB)" for gpu in machine.gpus)
    memory = "" if machine.memory is None else f", {machine.memory / 2**30:.0f} GiB of memory"
    revision = "none" if run.git is None else run.git.revision[:12] + (" with changes" if run.git.dirty else "")
    found = ", ".join(f"{name} {version}" for name, version in run.versions.items() if version)
    load = "unknown" if run.load is None else " ".join(f"{value:.2f}" for value in run.load)
    freed = run.settings.get(FREED_MEMORY)
    return [
        f"scale `{record.scale}` on {run.devices} {run.device.upper()} device(s){threads}",
        f"machine: {machine.cpu}, {machine.cores} core(s){memory}{gpus}; {machine.system}"
        + (f"; freed memory: {freed}" if freed else ""),
        f"versions: {found}; git revision {revision}",
        f"{run.state}: {run.started} to {run.ended or 'unknown'}; seed {run.seed}; load at start {load}",
        f"command: `{shlex.join(run.command)}`",
        f"record: `{record.name}.json`",
    ]
