"""Collect the numbers of each experiment for the report, by source.

There are four kinds of sources: published, predicted, emulated and measured. All numbers of a
source come from one record, so that they can be compared. For emulated and measured numbers, this
is the record of a single run of the experiment.

Runs that differ in scale, kind of device or engine are different sources. If several runs agree in
all of these, only the first one is a source, in the order of `ranked`: finished runs with few
disturbed rows come first.
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
from reproduce.tables.layout import ratio, reading_text, with_quartiles

FOLDERS = ("paper", "predicted", "measured")
RUN = ("emulated", "measured")  # the kinds of source whose tasks were run


@dataclass(frozen=True, eq=False)
class Source:
    """The results of one experiment in one record, which were all made in the same way.

    `label` is a text that distinguishes them from other sources, such as `measured (small, CPU)`.
    """

    kind: Literal["published", "predicted", "emulated", "measured"]
    label: str
    record: Record
    results: list[Result]


@dataclass(frozen=True, eq=False)
class Subject:
    """An experiment, or a published table that no experiment reproduces, with its numbers.

    Attributes:
        name: The name of the experiment or table.
        title: The title of the section.
        table: The name of the published table, or an empty text if there is none.
        sources: The sources of numbers. There is at least one.
    """

    name: str
    title: str
    table: str
    sources: list[Source]

    @property
    def rows(self) -> dict[str, Mapping[str, Json]]:
        """Return the configuration of each row of the first source, by the name of the row."""
        return {result.row: result.config for result in self.sources[0].results}

    @property
    def several_models(self) -> bool:
        """Return whether the rows train several models, each with a baseline row of its own."""
        models = {str(config.get("model")) for config in self.rows.values()}
        return len(models) > 1

    def find(self, source: Source, row: str) -> Entry | None:
        """Return the source's result with the row's name, or one that reproduces the row."""
        link = None if source.kind == "published" else f"{self.table}/{row}"
        for result in source.results:
            if result.row == row or (link and result.published == link):
                return Entry(source.record, result)
        return None

    def readings(self, source: Source, metric: str) -> dict[str, Reading]:
        """Return a source's values of a metric, by row. Rows without a value are left out.

        Speed-ups are over the first row. If the rows train several models, a row's speed-up is over
        the baseline row that the row names.
        """
        entries = {}
        results = {}
        for row in self.rows:
            entry = self.find(source, row)
            if entry is not None:
                entries[row] = entry
                results[row] = entry.result
        first = next(iter(self.rows))
        readings = {}
        for row, entry in entries.items():
            if metric == "speedup":
                base = str(entry.result.over) if self.several_models else first
                reading = speed_up(entry.result, results.get(base))
            else:
                reading = read(entry, metric)
            if reading is not None:
                readings[row] = reading
        return readings


def find_subjects(records: Sequence[Record]) -> list[Subject]:
    """Return what the sections of the report are about, in their order:

    1. the experiments that this program defines, in the order of `EXPERIMENTS`;
    2. other experiments in the records, for example of a newer version of this program;
    3. published tables that no experiment reproduces.
    """
    papers: dict[str, Source] = {}
    others = []
    names = dict.fromkeys(EXPERIMENTS)
    for record in records:
        if record.kind == "published":
            papers[record.name] = Source("published", "published", record, record.results)
        else:
            others.append(record)
            for result in record.results:
                names[result.experiment] = None
    subjects = []
    rest = dict(papers)
    for name in names:
        sources = [*_predicted(name, others), *_run(name, others)]
        table = _table_of(name, sources)
        title = name
        if table in papers:
            sources.insert(0, papers[table])
            title = papers[table].record.title
        else:  # the first source provides the table's rows
            sources.sort(key=lambda source: -len(source.results))
        if name in EXPERIMENTS:
            title = EXPERIMENTS[name].title
        if sources:
            subjects.append(Subject(name, title, table, sources))
            rest.pop(table, None)
    for name, paper in rest.items():
        subjects.append(Subject(name, paper.record.title, name, [paper]))
    return subjects


def _table_of(experiment: str, sources: Sequence[Source]) -> str:
    """Return the name of the published table that an experiment reproduces; "" if there is none."""
    if experiment in EXPERIMENTS:
        return EXPERIMENTS[experiment].table or ""
    for source in sources:
        for result in source.results:
            if result.published:
                return result.published.rpartition("/")[0]
    return ""


def _predicted(experiment: str, records: Sequence[Record]) -> Iterator[Source]:
    for record in records:
        results = []
        names: dict[str, None] = {}
        for result in record.results:
            if result.experiment == experiment:
                results.append(result)
                name = hardware_name(record, result)
                if name:
                    names[name] = None
        if record.kind == "predicted" and results:
            yield Source("predicted", f"predicted ({', '.join(names)})", record, results)


def _run(experiment: str, records: Sequence[Record]) -> list[Source]:
    """Return the sources of an experiment that are measured or emulated, oldest first."""
    best: dict[object, Source] = {}
    measured = [record for record in records if record.kind == "measured"]
    for record in ranked(measured, experiment):
        own = [result for result in record.results if result.experiment == experiment]
        for key, results in grouped(own, _how).items():
            if key not in best and any(result.status in SUCCESS for result in results):
                best[key] = _source(record, results)
    return sorted(best.values(), key=_started)


def _how(result: Result) -> tuple[object, ...]:
    """Return how a result was made, as a key. A record's results with equal keys are one source."""
    return result.scale, result.device, result.emulated, result.engine


def _source(record: Record, results: list[Result]) -> Source:
    """Make a source of results of one record that were made in the same way."""
    first = results[0]
    kind: Literal["emulated", "measured"] = "emulated" if first.emulated else "measured"
    label: str = kind
    where = [first.scale]
    if first.device == "meta":
        label = "counted"
    elif first.device:
        where.append(first.device.upper())
    if first.engine != "threads":
        where.append(first.engine)
    places = ", ".join(filter(None, where))
    if places:
        label += f" ({places})"
    return Source(kind, label, record, results)


def _started(source: Source) -> str:
    run = source.record.run
    return "" if run is None else run.started


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
    """The texts of a table that shows the numbers of several sources side by side.

    Attributes:
        rows: The names of the rows.
        fields: Columns for fields of the configurations, by heading. A column maps rows to texts.
        metrics: Columns for metrics, by heading: a column for each source that has the metric.
        notes: The notes below the table.
    """

    rows: list[str]
    fields: dict[str, Texts]
    metrics: dict[str, list[tuple[Source, Texts]]]
    notes: list[str]


def side_by_side(subject: Subject) -> SideBySide:
    """Return the table of all metrics from all sources of an experiment or published table."""
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
    """Return a column for each field in `FIELDS` that some row has. A dash stands for None."""
    fields = {}
    for name, heading in FIELDS.items():
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


def _text(entry: Entry | None, reading: Reading | None, metric: str) -> str:
    """Return the text of a cell: a metric's value from one source, or why there is no value."""
    if entry is None:
        return "-"
    if reading is None:
        return "-" if entry.result.status in SUCCESS else outcome(entry.result)
    if metric == "utilization":
        return f"{reading.middle:.0%}"
    if metric == "top1_error":
        return str(final_error(entry.result))
    if metric == "speedup" and reading.unit not in BYTES:
        return with_quartiles(reading, ratio)
    return reading_text(reading)


def _notes(subject: Subject, metrics: Container[str]) -> Iterator[str]:
    """Yield notes that explain the metrics, and notes on how the sources' work differs."""
    if "speed-up" in metrics:
        base = f"the first row, {next(iter(subject.rows))},"
        if subject.several_models:
            base = "plain training of the same model,"
        yield (
            f"Speed-up: throughput over that of {base} within each source. In brackets: quartiles."
        )
    if METRICS["top1_error"] in metrics:
        yield "Top-1 error: after the last epoch, mean +- standard deviation over the seeds."
    if "allocated memory" in metrics or "reserved memory" in metrics:
        yield (
            "Memory: the peak, summed over devices. Allocated: bytes of tensors. Reserved: what "
            "the caching allocator holds, which is what the papers publish. The two are not to be "
            "compared."
        )
    run = [source for source in subject.sources if source.kind in RUN]
    for sources in grouped(run, _place).values():
        names = {source.record.name for source in sources}
        if len(names) > 1:
            labels = [source.label for source in sources]
            yield f"Of different runs, which did not run in turn: {', '.join(labels)}."
    for source in run:
        yield from _other_work(subject, source)


def _place(source: Source) -> tuple[object, object]:
    """Return the scale and the kind of device of a source."""
    first = source.results[0]
    return first.scale, first.device


def _other_work(subject: Subject, source: Source) -> Iterator[str]:
    """Yield notes that say in which fields and rows a source differs from the first source."""
    fields: dict[str, None] = {}
    names: dict[str, None] = {}
    for row in subject.rows:
        theirs = subject.find(subject.sources[0], row)
        ours = subject.find(source, row)
        if theirs is None or ours is None or theirs.result is ours.result:
            continue
        for name in differing(theirs, ours):
            if name not in CHOSEN:
                fields[name] = None
        if ours.result.row != theirs.result.row:
            names[ours.result.row] = None
    label = source.label[:1].upper() + source.label[1:]
    if fields:
        yield f"{label} did other work than published, with other {', '.join(fields)}."
    if names:
        yield f"{label} shows its rows {', '.join(names)}."
