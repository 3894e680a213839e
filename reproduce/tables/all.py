"""Make all tables of a record, and the Markdown page about it."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from reproduce.experiments import EXPERIMENTS
from reproduce.experiments.row import Experiment
from reproduce.numbers.sources import Entry
from reproduce.records.record import FREED_MEMORY, Record, Result, Run
from reproduce.tables.accuracy import accuracy_tables
from reproduce.tables.engines import engines_tables
from reproduce.tables.layout import Table, bullets, many
from reproduce.tables.memory import memory_tables
from reproduce.tables.output import of_entry, written
from reproduce.tables.predicted import measured_rows, predicted_tables
from reproduce.tables.speed import ablation_tables, speed_tables

MAKERS: dict[str, Callable[[Experiment, Sequence[Result]], list[Table]]] = {
    "speed": speed_tables,
    "memory": memory_tables,
    "ablation": ablation_tables,
    "accuracy": accuracy_tables,
}


def tables(record: Record, experiment: str | None = None, group: str | None = None) -> list[Table]:
    """Return the tables of all experiments in the record, of one experiment, or of one group of its rows."""
    if record.kind == "predicted":
        return predicted_tables(record, measured_rows(record.results[0].experiment))
    made: list[Table] = []
    for name in dict.fromkeys(result.experiment for result in record.results):
        if name in EXPERIMENTS and experiment in (None, name):
            measures = EXPERIMENTS[name].measures
            under_way = record.run is not None and record.run.state == "running"
            results = [each for each in record.results if each.experiment == name]
            results = [each for each in results if not (under_way and each.status == "interrupted")]
            threads = [each for each in results if each.engine == "threads"]
            own = MAKERS[measures](EXPERIMENTS[name], threads) if threads else []
            own += engines_tables(EXPERIMENTS[name], results)
            more = [] if measures == "memory" else [*_about_times(record)]
            made += [
                replace(each, notes=[*each.notes, *more])
                for each in own
                if group in (None, each.group)
            ]
    return made


def _about_times(record: Record) -> Iterator[str]:
    """Warn about a CPU run's times if the CPU was busy at its start, or measured and emulated devices differ."""
    run = record.run
    if run is None or run.device != "cpu":
        return
    known = any("others" in result.samples for result in record.results)
    if run.load is not None and run.load[0] > run.machine.cores / 4 and not known:
        yield (
            f"load {run.load[0]:.2f} on {many(run.machine.cores, 'core')} in the minute before the start: unless that "
            "was another run of these, the machine was busy"
        )
    threads = run.threads_per_device or 1
    if threads > 1 and any(result.status == "emulated" for result in record.results):
        yield (
            f"a measured device is {threads} threads and an emulated one is one: their samples/s are not to be compared"
        )


def written_records(
    records: Sequence[Record], style: str, made: Sequence[Table] | None = None
) -> str:
    """Return records' tables as text or Markdown, or their numbers as CSV or JSON. `made` are other tables of them."""
    own = [table for record in records for table in tables(record)] if made is None else made
    text = "".join(f"\n{table.text()}\n" for table in own)
    markdown = (
        "\n".join(map(document, records))
        if made is None
        else "\n\n".join(x.markdown() for x in own) + "\n"
    )
    entries = [Entry(record, result) for record in records for result in record.results]
    return written(
        style, [number for entry in entries for number in of_entry(entry)], text, markdown
    )


def document(record: Record) -> str:
    """Return the record as a Markdown page: its tables, and where and how it was run."""
    parts = [f"# {record.title}"]
    if record.run is not None:
        parts.append(bullets(list(about_run(record, record.run).values()), wrap=False))
    parts.extend(table.markdown() for table in tables(record))
    return "\n\n".join(parts) + "\n"


def about_run(record: Record, run: Run) -> dict[str, str]:
    """Return lines about a record's run, by name: devices, machine, versions and so on."""
    machine = run.machine
    threads = (
        ""
        if run.threads_per_device is None
        else f" of {many(run.threads_per_device, 'thread')} each"
    )
    gpus = "".join(f", {gpu.name} ({gpu.memory / 2**30:.0f} GiB)" for gpu in machine.gpus)
    memory = "" if machine.memory is None else f", {machine.memory / 2**30:.0f} GiB of memory"
    freed = "; the C library kept freed memory" if run.settings.get(FREED_MEMORY) == "kept" else ""
    revision = "none" if run.git is None else run.git.name(12, " with changes ")
    programs = ", ".join(
        f"{program} {version}" for program, version in run.versions.items() if version
    )
    load = "unknown" if run.load is None else " ".join(f"{value:.2f}" for value in run.load)
    return {
        "devices": f"scale `{record.scale}`, on {many(run.devices, f'{run.device.upper()} device')}{threads}",
        "machine": f"machine: {machine.cpu}, {many(machine.cores, 'core')}{memory}{gpus}; {machine.system}{freed}",
        "versions": f"versions: {programs}; git revision {revision}",
        "run": f"{run.state}: {run.started} to {run.ended or 'unknown'}; seed {run.seed}; load at start {load}",
        "command": f"command: `{shlex.join(run.command)}`",
        "record": f"record: `{record.name}.json`",
    }
