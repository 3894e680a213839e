"""Gather what the report shows: of each experiment its published, predicted, emulated and measured numbers, by source.

A measured or emulated source is one run of the experiment at one scale, on one kind of device, with one engine: of
several runs, the first of `ranked`. So rows that are compared come from one run.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from reproduce.experiments import EXPERIMENTS
from reproduce.numbers.accuracy import final_error
from reproduce.numbers.match import CHOSEN, differing, grouped
from reproduce.numbers.metrics import (
    BYTES,
    DISTURBED,
    MARK,
    Reading,
    outcome,
    read,
    speed_up,
)
from reproduce.numbers.sources import Entry
from reproduce.records.places import Json
from reproduce.records.record import SUCCESS, Record, Result, hardware_name, ranked
from reproduce.tables.layout import number, ratio, reading_text, with_quartiles

FOLDERS = ("paper", "predicted", "measured")
RUN = ("emulated", "measured")  # the kinds of source whose tasks were run


@dataclass(frozen=True, eq=False)
class Source:
    """Hold the results of an experiment in one record; `label` distinguishes it from other sources."""

    kind: Literal["published", "predicted", "emulated", "measured"]
    label: str
    record: Record
    results: list[Result]


@dataclass(frozen=True, eq=False)
class Subject:
    """Hold an experiment, or a published table that no experiment reproduces, and its sources, at least one."""

    name: str
    title: str
    table: str
    sources: list[Source]

    @property
    def rows(self) -> dict[str, Mapping[str, Json]]:
        """Give the rows of the table and their configurations. They are the rows of the first source."""
        return {result.row: result.config for result in self.sources[0].results}

    @property
    def several_models(self) -> bool:
        """Say whether the rows have several models. Then each model has its own baseline row."""
        return len({str(config.get("model")) for config in self.rows.values()}) > 1

    def find(self, source: Source, row: str) -> Entry | None:
        """Return a source's result for the row: the one of that name, or the one that reproduces it."""
        link = None if source.kind == "published" else f"{self.table}/{row}"
        rows = [
            result
            for result in source.results
            if result.row == row or (link and result.published == link)
        ]
        return Entry(source.record, rows[0]) if rows else None

    def readings(self, source: Source, metric: str) -> dict[str, Reading]:
        """Return a source's readings of a metric, by row, without rows that have none.

        The baseline of speed-ups is the first row; with several models, the row that each row names.
        """
        entries = {row: entry for row in self.rows if (entry := self.find(source, row)) is not None}
        first = next(iter(self.rows))
        if metric == "speedup":
            bases = {
                row: str(entry.result.over) if self.several_models else first
                for row, entry in entries.items()
            }
            results = {row: entry.result for row, entry in entries.items()}
            readings = {
                row: speed_up(result, results.get(bases[row])) for row, result in results.items()
            }
        else:
            readings = {row: read(entry, metric) for row, entry in entries.items()}
        return {row: reading for row, reading in readings.items() if reading is not None}


def find_subjects(records: Sequence[Record]) -> list[Subject]:
    """Return the experiments in order, then unknown experiments in records, then the other published tables."""
    papers = {
        record.name: Source("published", "published", record, record.results)
        for record in records
        if record.kind == "published"
    }
    others = [record for record in records if record.kind != "published"]
    names = dict.fromkeys(
        [*EXPERIMENTS, *(result.experiment for record in others for result in record.results)]
    )
    subjects = []
    for name in names:
        known, sources = EXPERIMENTS.get(name), [*_predicted(name, others), *_run(name, others)]
        links = [
            result.published for source in sources for result in source.results if result.published
        ]
        table = known.table or "" if known else links[0].rpartition("/")[0] if links else ""
        if table in papers:
            sources[:0] = [papers[table]]
        else:  # the first source provides the table's rows
            sources.sort(key=lambda source: -len(source.results))
        title = known.title if known else papers[table].record.title if table in papers else name
        if sources:
            subjects.append(Subject(name, title, table, sources))
    used = {subject.table for subject in subjects}
    rest = {name: paper for name, paper in papers.items() if name not in used}
    return subjects + [
        Subject(name, paper.record.title, name, [paper]) for name, paper in rest.items()
    ]


def _predicted(experiment: str, records: Sequence[Record]) -> Iterator[Source]:
    for record in records:
        results = [result for result in record.results if result.experiment == experiment]
        if record.kind == "predicted" and results:
            names = dict.fromkeys(
                filter(None, (hardware_name(record, result) for result in results))
            )
            yield Source("predicted", f"predicted ({', '.join(names)})", record, results)


def _run(experiment: str, records: Sequence[Record]) -> list[Source]:
    best: dict[tuple[str | bool | None, ...], Source] = {}
    for record in ranked([record for record in records if record.kind == "measured"], experiment):
        own = [result for result in record.results if result.experiment == experiment]
        for key, results in grouped(
            own, lambda each: (each.scale, each.device, each.emulated, each.engine)
        ).items():
            scale, device, emulated, engine = key
            kind: Literal["emulated", "measured"] = "emulated" if emulated else "measured"
            verb = "counted" if device == "meta" else kind
            by = None if engine == "threads" else engine
            where = ", ".join(
                filter(None, [scale, device.upper() if device and device != "meta" else None, by])
            )
            if any(each.status in SUCCESS for each in results):
                best.setdefault(
                    key, Source(kind, f"{verb} ({where})" if where else verb, record, results)
                )
    return sorted(
        best.values(), key=lambda source: source.record.run.started if source.record.run else ""
    )


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
    """Hold a table's texts: columns of configuration fields, columns of each metric by source, and notes."""

    rows: list[str]
    fields: dict[str, Texts]
    metrics: dict[str, list[tuple[Source, Texts]]]
    notes: list[str]


def side_by_side(subject: Subject) -> SideBySide:
    """Return the table of all metrics and all sources."""
    rows = subject.rows
    fields = {
        heading: {
            row: "-" if config.get(name) is None else str(config[name])
            for row, config in rows.items()
        }
        for name, heading in FIELDS.items()
        if any(config.get(name) is not None for config in rows.values())
    }
    metrics: dict[str, list[tuple[Source, Texts]]] = {}
    for metric, heading in METRICS.items():
        for source in subject.sources:
            if readings := subject.readings(source, metric):
                texts = {
                    row: _text(subject.find(source, row), readings.get(row), metric) for row in rows
                }
                metrics.setdefault(heading, []).append((source, texts))
    marked = any(
        MARK in text for own in metrics.values() for _, texts in own for text in texts.values()
    )
    return SideBySide(
        list(rows), fields, metrics, [*_notes(subject, metrics), *[DISTURBED] * marked]
    )


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
    return with_quartiles(reading, ratio) if metric == "speedup" else number(reading)


def _notes(subject: Subject, metrics: Container[str]) -> Iterator[str]:
    if "speed-up" in metrics:
        first = f"the first row, {next(iter(subject.rows))},"
        base = "plain training of the same model," if subject.several_models else first
        yield f"Speed-up: throughput over that of {base} within each source. In brackets: quartiles."
    if METRICS["top1_error"] in metrics:
        yield "Top-1 error: after the last epoch, mean +- standard deviation over the seeds."
    if "allocated memory" in metrics or "reserved memory" in metrics:
        yield (
            "Memory: the peak, summed over devices. Allocated: bytes of tensors. Reserved: what the caching allocator "
            "holds, which is what the papers publish. The two are not to be compared."
        )
    run = [source for source in subject.sources if source.kind in RUN]
    for sources in grouped(
        run, lambda each: (each.results[0].scale, each.results[0].device)
    ).values():
        names = dict.fromkeys(source.record.name for source in sources)
        if len(names) > 1:
            yield f"Of different runs, which did not run in turn: {', '.join(x.label for x in sources)}."
    for source in run:
        both = [
            (subject.find(subject.sources[0], row), subject.find(source, row))
            for row in subject.rows
        ]
        pairs = [
            (theirs, ours)
            for theirs, ours in both
            if theirs and ours and theirs.result is not ours.result
        ]
        fields = dict.fromkeys(
            name for pair in pairs for name in differing(*pair) if name not in CHOSEN
        )
        names = dict.fromkeys(
            ours.result.row for theirs, ours in pairs if ours.result.row != theirs.result.row
        )
        label = source.label[:1].upper() + source.label[1:]
        if fields:
            yield f"{label} did other work than published, with other {', '.join(fields)}."
        if names:
            yield f"{label} shows its rows {', '.join(names)}."
