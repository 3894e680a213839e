"""Lay published, predicted and measured numbers side by side: a line for each published row, columns by metric."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from reproduce.numbers.accuracy import final_error
from reproduce.numbers.match import CHOSEN, differing
from reproduce.numbers.metrics import BYTES, Reading, outcome
from reproduce.report.subjects import Source, Subject
from reproduce.tables.text import number, ratio, reading_text, with_quartiles

METRICS = {  # metric -> what stands above its columns
    "throughput": "samples/s",
    "speedup": "speed-up",
    "utilization": "utilization",
    "memory": "allocated memory",
    "reserved": "reserved memory",
    "parameters": "parameters",
    "top1_error": "top-1 error, %",
}
FIELDS = {"partitions": "n", "chunks": "m", "batch_size": "batch"}


@dataclass(frozen=True)
class Column:
    """Name a column: a metric and, below it, a source; or a field of the configuration, which has none."""

    heading: str
    source: Source | None = None


@dataclass(frozen=True)
class SideBySide:
    """Hold the table's cells as text, the row's name first, and notes."""

    columns: list[Column]
    rows: list[list[str]]
    notes: list[str]

    @property
    def groups(self) -> list[tuple[str, int]]:
        """List the metrics that stand above columns, none above fields, each with the number of its columns."""
        headings = (column.heading if column.source else "" for column in self.columns)
        return [(heading, len(list(same))) for heading, same in itertools.groupby(headings)]


def side_by_side(subject: Subject) -> SideBySide:
    """Return the table of everything that any source says of the rows."""
    rows = subject.rows
    fields = [name for name in FIELDS if any(config.get(name) is not None for config in rows.values())]
    first = next(iter(rows), "")
    cells: list[tuple[Column, dict[str, str]]] = []
    for metric, heading in METRICS.items():
        for source in subject.sources:
            found = {row: source.read(row, first, subject.table, metric) for row in rows}
            if any(reading is not None for reading in found.values()):
                column = {row: _cell(reading, subject, source, row, metric) for row, reading in found.items()}
                cells.append((Column(heading, source), column))
    lines = [
        [row, *(_field(config, name) for name in fields), *(column[row] for _, column in cells)]
        for row, config in rows.items()
    ]
    columns = [Column("row"), *(Column(FIELDS[name]) for name in fields), *(column for column, _ in cells)]
    return SideBySide(columns, lines, _notes(subject, first, {column.heading for column, _ in cells}))


def _field(config: Mapping[str, object], name: str) -> str:
    value = config.get(name)
    return "-" if value is None else str(value)


def _cell(reading: Reading | None, subject: Subject, source: Source, row: str, metric: str) -> str:
    entry = source.find(row, f"{subject.table}/{row}")
    if entry is None:
        return "-"
    if reading is None:
        return "-" if entry.result.status in ("measured", "published", "predicted") else outcome(entry.result)
    if metric == "utilization":
        return f"{reading.middle:.0%}"
    if metric == "top1_error":
        return str(final_error(entry.result))
    if reading.unit in BYTES:
        return reading_text(reading)
    return with_quartiles(reading, ratio if metric == "speedup" else number)


def _notes(subject: Subject, first: str, headings: set[str]) -> list[str]:
    notes = []
    if "speed-up" in headings:
        notes.append(f"Speed-up: throughput over that of the first row, {first}, within each source. "
                     "In brackets: quartiles.")  # fmt: skip
    if METRICS["top1_error"] in headings:
        notes.append("Top-1 error: after the last epoch, mean +- standard deviation over the seeds.")
    if "allocated memory" in headings or "reserved memory" in headings:
        notes.append("Memory: the peak, summed over devices. Allocated: bytes of tensors. Reserved: what the caching "
                     "allocator holds, which is what the papers publish. The two are not to be compared.")  # fmt: skip
    for source in subject.sources:
        if source.kind == "measured":
            fields: dict[str, None] = {}
            names: dict[str, None] = {}
            for row in subject.rows:
                ours = source.find(row, f"{subject.table}/{row}")
                theirs = subject.sources[0].find(row, f"{subject.table}/{row}")
                if ours is not None and theirs is not None and ours.result is not theirs.result:
                    fields.update(dict.fromkeys(name for name in differing(theirs, ours) if name not in CHOSEN))
                    if ours.result.row != row:
                        names[ours.result.row] = None
            if fields:
                notes.append(f"{_capital(source.label)} did other work than published, with other {', '.join(fields)}.")
            if names:
                notes.append(f"{_capital(source.label)} shows its rows {', '.join(names)}.")
    return notes


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
