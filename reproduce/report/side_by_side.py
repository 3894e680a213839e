"""Lay the numbers of all sources side by side: a line for each published row, columns by metric."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass

from reproduce.numbers.match import CHOSEN, differing
from reproduce.numbers.metrics import BYTES, Reading, final_error, outcome
from reproduce.numbers.sources import Entry
from reproduce.records.record import SUCCESS
from reproduce.report.subjects import RUN, Source, Subject
from reproduce.tables.layout import number, ratio, reading_text, with_quartiles

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
Texts = dict[str, str]  # by row


@dataclass(frozen=True)
class SideBySide:
    """Hold a table's texts: columns of the rows' configurations, columns of sources by metric, and notes."""

    rows: list[str]
    fields: dict[str, Texts]
    metrics: dict[str, list[tuple[Source, Texts]]]
    notes: list[str]


def side_by_side(subject: Subject) -> SideBySide:
    """Return the table of everything that any source says of the rows."""
    rows = subject.rows
    fields = {
        heading: {row: "-" if config.get(name) is None else str(config[name]) for row, config in rows.items()}
        for name, heading in FIELDS.items()
        if any(config.get(name) is not None for config in rows.values())
    }
    metrics: dict[str, list[tuple[Source, Texts]]] = {}
    for metric, heading in METRICS.items():
        for source in subject.sources:
            if readings := subject.readings(source, metric):
                texts = {row: _text(subject.find(source, row), readings.get(row), metric) for row in rows}
                metrics.setdefault(heading, []).append((source, texts))
    return SideBySide(list(rows), fields, metrics, list(_notes(subject, metrics)))


def _text(entry: Entry | None, reading: Reading | None, metric: str) -> str:
    if entry is None:
        return "-"
    if reading is None:
        return "-" if entry.result.status in SUCCESS else outcome(entry.result)
    if metric == "utilization":
        return f"{reading.middle:.0%}"
    if metric == "top1_error":
        return str(final_error(entry.result))
    if reading.unit in BYTES:
        return reading_text(reading)
    return with_quartiles(reading, ratio) if metric == "speedup" else number(reading.middle)


def _notes(subject: Subject, metrics: Container[str]) -> Iterator[str]:
    if "speed-up" in metrics:
        first = (
            "plain training of the same model,"
            if subject.several_models
            else f"the first row, {next(iter(subject.rows))},"
        )
        yield f"Speed-up: throughput over that of {first} within each source. In brackets: quartiles."
    if METRICS["top1_error"] in metrics:
        yield "Top-1 error: after the last epoch, mean +- standard deviation over the seeds."
    if "allocated memory" in metrics or "reserved memory" in metrics:
        yield (
            "Memory: the peak, summed over devices. Allocated: bytes of tensors. Reserved: what the caching allocator "
            "holds, which is what the papers publish. The two are not to be compared."
        )
    for source in (source for source in subject.sources if source.kind in RUN):
        both = [(subject.find(subject.sources[0], row), subject.find(source, row)) for row in subject.rows]
        pairs = [(theirs, ours) for theirs, ours in both if theirs and ours and theirs.result is not ours.result]
        fields = dict.fromkeys(name for pair in pairs for name in differing(*pair) if name not in CHOSEN)
        names = dict.fromkeys(ours.result.row for theirs, ours in pairs if ours.result.row != theirs.result.row)
        label = source.label[:1].upper() + source.label[1:]
        if fields:
            yield f"{label} did other work than published, with other {', '.join(fields)}."
        if names:
            yield f"{label} shows its rows {', '.join(names)}."
