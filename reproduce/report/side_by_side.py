"""Make the report's tables that show published, predicted, measured and emulated numbers together.

Each source of numbers, such as one measured run, has a column of its own.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from reproduce.numbers.accuracy import final_error
from reproduce.numbers.match import CHOSEN, differing, grouped
from reproduce.numbers.metrics import DISTURBED, MARK, Reading, outcome
from reproduce.numbers.sources import Entry
from reproduce.records.record import RULE, SUCCESS
from reproduce.report.subjects import RUN, Source, Subject
from reproduce.tables.layout import ratio, reading_text, with_quartiles

METRICS = {  # the heading of the columns of each metric
    "throughput": "samples/s",
    "speedup": "speed-up",
    "utilization": "utilization",
    "memory": "allocated memory",
    "reserved": "reserved memory",
    "parameters": "parameters",
    "top1_error": "top-1 error, %",
}
FIELDS = {"partitions": "n", "chunks": "m", "batch_size": "batch"}
Texts = dict[str, str]
"""A column of the table: maps the name of a row to the text of its cell."""
Columns = Mapping[str, Iterable[tuple[Source, Texts]]]
"""Maps the heading of a metric to the columns that show it, one for each source of numbers."""


@dataclass(frozen=True)
class SideBySide:
    """The texts of tables that show the numbers of several sources side by side.

    A source is, for example, a measured run. There is a table for each metric, because a table with
    all metrics would be wider than paper.

    Attributes:
        rows: The names of the rows (configurations).
        fields: Maps headings to columns that show settings of the rows, such as the batch size. A
            column is a dictionary with the text of each row.
        metrics: Maps the heading of each metric to its columns: one for each source that has
            numbers of this metric.
        notes: The notes below the tables.
    """

    rows: list[str]
    fields: dict[str, Texts]
    metrics: dict[str, list[tuple[Source, Texts]]]
    notes: list[str]


def side_by_side(subject: Subject) -> SideBySide:
    """Return the tables of an experiment or published table: all metrics from all sources."""
    rows = subject.rows
    metrics: dict[str, list[tuple[Source, Texts]]] = {}
    marked = False
    for metric, heading in METRICS.items():
        for source in subject.sources:
            readings = subject.readings(source, metric)
            if not readings:
                continue
            texts = {}
            for row in rows:
                text = _text(subject.find(source, row), readings.get(row), metric)
                texts[row] = text
                if MARK in text:
                    marked = True
            metrics.setdefault(heading, []).append((source, texts))
    notes = list(_notes(subject, metrics))
    if marked:
        notes.append(DISTURBED)
    return SideBySide(list(rows), _fields(subject), metrics, notes)


def _fields(subject: Subject) -> dict[str, Texts]:
    """Return a dictionary from headings to columns that show settings, such as the batch size.

    A setting that no row has is left out. If only some rows have a setting, the others show a dash.
    If another source ran the same rows with other values of a setting, the heading names the source
    whose values are shown.
    """
    fields = {}
    for name, heading in FIELDS.items():
        if _sources_differ(subject, name):
            heading += f" ({subject.lead.label})"
        texts = {}
        known = False
        for row, config in subject.rows.items():
            value = config.get(name)
            texts[row] = "-" if value is None else str(value)
            if value is not None:
                known = True
        if known:
            fields[heading] = texts
    return fields


def _sources_differ(subject: Subject, name: str) -> bool:
    """Return whether a source has, in a row, another value of a setting than the table shows."""
    for row, config in subject.rows.items():
        for source in subject.sources:
            entry = subject.find(source, row)
            if entry is not None and entry.result.config.get(name) != config.get(name):
                return True
    return False


def _text(entry: Entry | None, reading: Reading | None, metric: str) -> str:
    """Return the text of a cell: the value of a metric in a row, or why there is no value.

    Args:
        entry: The result of the row from one source, or None if the source does not have the row.
        reading: The value of the metric, or None if the result does not have it.
        metric: The name of the metric.
    """
    if entry is None:
        return "-"
    if reading is None:
        return "-" if entry.result.status in SUCCESS else outcome(entry.result)
    if metric == "utilization":
        return f"{reading.middle:.0%}{reading.mark}"
    if metric == "top1_error":
        return str(final_error(entry.result))
    if metric == "speedup":
        return with_quartiles(reading, ratio)
    return reading_text(reading)


def _notes(subject: Subject, metrics: Columns) -> Iterator[str]:
    """Yield the notes below the tables.

    The notes explain the metrics and the sources of numbers, and say which numbers are left out.
    """
    if "speed-up" in metrics:
        base = f"the first row, {next(iter(subject.rows))},"
        if subject.several_models:
            base = "plain training of the same model,"
        yield (
            f"Speed-up: throughput over that of {base} within each source. In brackets: quartiles."
        )
    if METRICS["top1_error"] in metrics:
        yield "Top-1 error: after the last epoch, mean ± standard deviation over the seeds."
    if "allocated memory" in metrics or "reserved memory" in metrics:
        yield (
            "Memory: the peak, summed over devices. Allocated: bytes of tensors. Reserved: what "
            "the caching allocator holds, which is what the papers publish. The two are not to be "
            "compared."
        )
    run = [source for source in subject.sources if source.kind in RUN]
    yield from _without_rows(run, metrics)
    for sources in grouped(run, _place).values():
        names = {source.record.name for source in sources}
        if len(names) > 1:
            labels = [source.label for source in sources]
            yield f"Of different runs, which did not run in turn: {', '.join(labels)}."
    for source in run:
        yield from _other_work(subject, source)
    yield from _left_out(subject)


def _without_rows(run: Iterable[Source], metrics: Columns) -> Iterator[str]:
    """Yield a note for each source of numbers that has none of the rows in the tables.

    A source is, for example, a measured run. A source without these rows has no column in the
    tables, but a table of its own below them.

    Args:
        run: The measured and emulated sources of the experiment.
        metrics: The columns of the tables.
    """
    shown: set[Source] = set()
    for columns in metrics.values():
        shown.update(source for source, _ in columns)
    for source in run:
        if source not in shown:
            yield f"{_capital(source.label)} has none of these rows; its own are below."


def _place(source: Source) -> tuple[object, object]:
    """Return a source's scale (the named set of sizes of its rows) and its kind of device."""
    first = source.results[0]
    return first.scale, first.device


def _other_work(subject: Subject, source: Source) -> Iterator[str]:
    """Yield notes on how a source's rows differ from the rows of the source `subject.lead`.

    All sources of numbers are compared with the source `subject.lead`. The notes name the settings
    in which the same row differs between the two sources, and the rows whose names differ.
    """
    lead = subject.lead
    fields: dict[str, None] = {}
    names: dict[str, None] = {}
    for row in subject.rows:
        theirs = subject.find(lead, row)
        ours = subject.find(source, row)
        if theirs is None or ours is None or theirs.result is ours.result:
            continue
        for name in differing(theirs, ours):
            if name not in CHOSEN:
                fields[name] = None
        if ours.result.row != theirs.result.row:
            names[ours.result.row] = None
    label = _capital(source.label)
    if fields:
        yield f"{label} did other work than {lead.label}, with other {', '.join(fields)}."
    if names:
        yield f"{label} shows its rows {', '.join(names)}."


def _left_out(subject: Subject) -> Iterator[str]:
    """Yield notes that name the runs whose numbers the report does not show, and say why."""
    superseded: dict[str, list[str]] = {}  # run's name -> sources' labels
    empty: dict[str, list[str]] = {}
    for source in subject.left_out:
        named = superseded if source.succeeded else empty
        named.setdefault(source.record.name, []).append(source.label)
    reasons = {
        f"other runs of the same rows count ({RULE})": superseded,
        "no row has a number": empty,
    }
    for reason, named in reasons.items():
        if named:
            runs = [f"{name}: {', '.join(labels)}" for name, labels in named.items()]
            yield f"Left out, because {reason}: {'; '.join(runs)}."


def _capital(text: str) -> str:
    """Return the text with its first letter in upper case."""
    return text[:1].upper() + text[1:]
