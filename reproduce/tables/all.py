"""Make all tables of a record (a file of results), and the Markdown page about the record."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from reproduce.experiments import EXPERIMENTS, predictable
from reproduce.experiments.row import Experiment
from reproduce.numbers.match import grouped
from reproduce.numbers.sources import Entry
from reproduce.records.record import FREED_MEMORY, Record, Result, Run
from reproduce.tables.accuracy import accuracy_tables
from reproduce.tables.engines import engines_tables
from reproduce.tables.layout import GiB, Table, bullets, many
from reproduce.tables.measured import measured_rows
from reproduce.tables.memory import memory_tables
from reproduce.tables.output import Number, of_entry, written
from reproduce.tables.plain import plain_tables
from reproduce.tables.predicted import predicted_tables
from reproduce.tables.speed import ablation_tables, speed_tables

Results = Sequence[Result]
MAKERS: dict[str, Callable[[Experiment, Results], list[Table]]] = {
    "speed": speed_tables,
    "memory": memory_tables,
    "ablation": ablation_tables,
    "accuracy": accuracy_tables,
}
INTERRUPTED = "the run was interrupted: rows may be missing, or have fewer steps than the others"
NOT_ENDED = (
    "the run has not ended, or was killed: rows may be missing, or have fewer steps than the others"
)


def tables(record: Record, experiment: str | None = None, group: str | None = None) -> list[Table]:
    """Return the tables of a record (a file of results).

    Args:
        record: The record.
        experiment: The experiment whose tables are returned, or None for all experiments.
        group: The group of rows (compared configurations) whose table is returned, or None for all
            groups.
    """
    if record.kind == "predicted" and record.results[0].experiment in predictable():
        predicted = record.results[0].experiment
        return predicted_tables(record, measured_rows(predicted))
    made: list[Table] = []
    of_experiments = grouped(record.results, lambda result: result.experiment)
    unknown: list[Result] = []
    for name, results in of_experiments.items():
        if experiment not in (None, name):
            continue
        if name not in EXPERIMENTS:
            unknown += results
            continue
        notes = _about_run(record, EXPERIMENTS[name], shown_alone=group is not None)
        results = _without_pending(record, results)
        for table in _tables_of(EXPERIMENTS[name], results):
            if group in (None, table.group):
                all_notes = [*table.notes, *notes]
                made.append(replace(table, notes=all_notes))
    made += plain_tables(record, unknown)
    return made


def _about_run(record: Record, experiment: Experiment, *, shown_alone: bool) -> list[str]:
    """Return notes about a run that stand below the tables of an experiment.

    Args:
        record: The record of the run.
        experiment: The experiment.
        shown_alone: Whether a run shows the tables of one of its groups, which has just finished.
    """
    notes: list[str] = []
    if record.run is not None and record.run.state == "interrupted":
        notes.append(INTERRUPTED)
    # A run shows its own groups one by one, each when it is finished.
    if record.run is not None and record.run.state == "running" and not shown_alone:
        notes.append(NOT_ENDED)
    if experiment.measures == "accuracy":
        notes += record.notes  # which epochs come from earlier runs
    if experiment.measures != "memory":
        notes += _about_times(record)
    return notes


def _without_pending(record: Record, results: list[Result]) -> list[Result]:
    """Return the results of a record, without the unfinished rows of a run that still goes on."""
    if record.run is None or record.run.state != "running":
        return results
    return [result for result in results if result.status != "interrupted"]


def _tables_of(experiment: Experiment, results: Results) -> list[Table]:
    """Return the tables of an experiment: tables of the engine `threads`, and one of all engines.

    An engine is a way to run the partitions of a pipeline in parallel. The table of all engines
    compares them.
    """
    made: list[Table] = []
    threads = [result for result in results if result.engine == "threads"]
    if threads:
        make = MAKERS[experiment.measures]
        made += make(experiment, threads)
    made += engines_tables(experiment, results)
    return made


def _about_times(record: Record) -> Iterator[str]:
    """Yield notes that warn about the times of a run on a CPU, in two cases:

    - The CPU was busy before the run started, so other programs may have slowed the run down.
    - A measured device had several threads, but an emulated device had only one, so the times of
      measured and emulated rows cannot be compared.
    """
    run = record.run
    if run is None or run.device != "cpu":
        return
    emulated = False
    known = False  # whether the run recorded how busy other programs kept the machine
    for result in record.results:
        if result.status == "emulated":
            emulated = True
        if "others" in result.samples:
            known = True
    cores = run.machine.cores
    if run.load is not None and run.load[0] > cores / 4 and not known:
        yield (
            f"The load was {run.load[0]:.2f} on {many(cores, 'core')} in the minute before the "
            "start. Unless this was another run of this program, the machine was busy."
        )
    threads = run.threads_per_device or 1
    if threads > 1 and emulated:
        yield (
            f"a measured device is {threads} threads and an emulated one is one: their samples/s "
            "are not to be compared"
        )


def written_records(
    records: Sequence[Record], style: str, made: Sequence[Table] | None = None
) -> str:
    """Return the tables of records as text or Markdown, or the numbers of records as CSV or JSON.

    Args:
        records: The records.
        style: "text", "markdown", "csv" or "json".
        made: Other tables, which text and Markdown show instead of the records' own tables.
    """
    text = ""
    pages: list[str] = []
    numbers: list[Number] = []
    for table in made or ():
        text += f"\n{table.text()}\n"
        pages.append(table.markdown())
    for record in records:
        if made is None:
            own = tables(record)
            for table in own:
                text += f"\n{table.text()}\n"
            if not own:
                text += f"\n{record.title}: no row of it has ended yet\n"
            pages.append(document(record))
        for result in record.results:
            numbers += of_entry(Entry(record, result))
    markdown = "\n".join(pages)
    if made is not None:
        markdown = "\n\n".join(pages) + "\n"
    return written(style, numbers, text, markdown)


def document(record: Record) -> str:
    """Return a Markdown page about a file of results: the tables, and how and where rows ran."""
    parts = [f"# {record.title}"]
    if record.run is not None:
        lines = about_run(record, record.run)
        parts.append(bullets(list(lines.values()), wrap=False))
    parts += [table.markdown() for table in tables(record)]
    return "\n\n".join(parts) + "\n"


def about_run(record: Record, run: Run) -> dict[str, str]:
    """Return lines of text about the run that made a record (a file of results).

    The keys are the topics of the lines, such as "devices", "machine" and "versions".
    """
    devices = many(run.devices, f"{run.device.upper()} device")
    if run.threads_per_device is not None:
        devices += f" of {many(run.threads_per_device, 'thread')} each"
    revision = "none" if run.git is None else run.git.name(12, " with changes ")
    programs = []
    for program, version in run.versions.items():
        if version:
            programs.append(f"{program} {version}")
    load = "unknown"
    if run.load is not None:
        load = " ".join(f"{value:.2f}" for value in run.load)
    ended = run.ended or "unknown"
    state = f"{run.state}: {run.started} to {ended}"
    lines = {"devices": f"scale `{record.scale}`, on {devices}"}
    lines["machine"] = _about_machine(run)
    lines["versions"] = f"versions: {', '.join(programs)}; git revision {revision}"
    lines["run"] = f"{state}; seed {run.seed}; load at start {load}"
    lines["command"] = f"command: `{shlex.join(run.command)}`"
    lines["record"] = f"record: `{record.name}.json`"
    return lines


def _about_machine(run: Run) -> str:
    """Return a line of text that describes the machine of a run.

    The line also says if the C library kept freed memory for later use, which makes times steadier.
    """
    machine = run.machine
    line = f"machine: {machine.cpu}, {many(machine.cores, 'core')}"
    if machine.memory is not None:
        line += f", {machine.memory / GiB:.0f} GiB of memory"
    for gpu in machine.gpus:
        line += f", {gpu.name} ({gpu.memory / GiB:.0f} GiB)"
    line += f"; {machine.system}"
    if run.settings.get(FREED_MEMORY) == "kept":
        line += "; the C library kept freed memory"
    return line
