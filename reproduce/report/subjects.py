"""Gather what the report shows: for each experiment its published, predicted and measured numbers, by source.

A measured source is one run of the experiment at one scale on one kind of device: of several the one that measured
most rows, and of those the newest, so that rows which are compared ran side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from reproduce.experiments import EXPERIMENTS
from reproduce.numbers.metrics import Reading, read, speed_up
from reproduce.numbers.sources import Entry
from reproduce.records.record import Record, Result, hardware_name, load

FOLDERS = ("paper", "predicted", "measured")
CONTROLS = ("naive", "checkpoint-only")  # not what a published pipeline is first compared with


@dataclass(frozen=True, eq=False)
class Source:
    """Hold the rows of an experiment that one record says something of.

    `label` tells it from the subject's other sources; `anchor` is where the page says what machine is behind it.
    """

    kind: Literal["published", "predicted", "measured"]
    label: str
    record: Record
    results: list[Result]

    @property
    def anchor(self) -> str:
        """Give the id of the record's entry among the machines."""
        return f"machine-{self.record.name}"

    def find(self, row: str, link: str) -> Entry | None:
        """Return the row that is, or reproduces, the published one of that name; `link` is its name with its table."""
        if self.kind == "published":
            found = [result for result in self.results if result.row == row]
        else:
            found = [result for result in self.results if result.published == link or result.row == row]
        found.sort(key=lambda result: result.config.get("configuration") in CONTROLS)
        return Entry(self.record, found[0]) if found else None

    def read(self, row: str, first: str, table: str, metric: str) -> Reading | None:
        """Return what the source says of a published row; a speed-up is over the row `first`."""
        entry = self.find(row, f"{table}/{row}")
        if metric != "speedup":
            return None if entry is None else read(entry, metric)
        base = self.find(first, f"{table}/{first}")
        return None if entry is None or base is None else speed_up(entry.result, base.result)


@dataclass(frozen=True, eq=False)
class Subject:
    """Hold an experiment, or a published table that no experiment reproduces."""

    name: str
    title: str
    table: str
    sources: list[Source] = field(default_factory=list)

    @property
    def published(self) -> Source | None:
        """Give the published table."""
        return next((source for source in self.sources if source.kind == "published"), None)

    @property
    def measured(self) -> list[Source]:
        """Give the runs."""
        return [source for source in self.sources if source.kind == "measured"]

    @property
    def rows(self) -> dict[str, Mapping[str, object]]:
        """Give the rows that sources are laid side by side in, each with its configuration: those of the first."""
        first = next(iter(self.sources), None)
        return {} if first is None else {result.row: result.config for result in first.results}


def load_folders(*folders: Path) -> list[Record]:
    """Load all records of the folders; any may be missing.

    Raises:
        Error: a file is broken, or no record.
    """
    return [load(path) for folder in folders for path in sorted(folder.glob("*.json"))]


def find_subjects(records: Sequence[Record]) -> list[Subject]:
    """Return the experiments, in their own order, then those that only records know, then other published tables."""
    published = {record.name: record for record in records if record.kind == "published"}
    others = [record for record in records if record.kind != "published"]
    names = dict.fromkeys([*EXPERIMENTS, *(result.experiment for record in others for result in record.results)])
    subjects = []
    for name in names:
        known = EXPERIMENTS.get(name)
        table = known.table if known else _table(name, others)
        title = known.title if known else published[table].title if table in published else name
        sources = [_published(published[table])] if table in published else []
        sources += [*_predicted(name, others), *_measured(name, others)]
        if sources:
            subjects.append(Subject(name, title, table, sources))
    used = {subject.table for subject in subjects}
    return subjects + [
        Subject(name, record.title, name, [_published(record)])
        for name, record in published.items()
        if name not in used
    ]


def _table(experiment: str, records: Sequence[Record]) -> str:
    """Return the published table that an experiment's rows say they reproduce."""
    links = (result.published for record in records for result in record.results if result.experiment == experiment)
    return next((link.rpartition("/")[0] for link in links if link), "")


def _published(record: Record) -> Source:
    return Source("published", "published", record, record.results)


def _predicted(experiment: str, records: Sequence[Record]) -> list[Source]:
    found = []
    for record in records:
        results = [result for result in record.results if result.experiment == experiment]
        if record.kind == "predicted" and results:
            names = dict.fromkeys(filter(None, (hardware_name(record, result) for result in results)))
            found.append(Source("predicted", f"predicted ({', '.join(names)})", record, results))
    return found


def _measured(experiment: str, records: Sequence[Record]) -> list[Source]:
    best: dict[tuple[str | None, str | None], Source] = {}
    for record in sorted(records, key=lambda record: record.run.started if record.run else ""):
        groups: dict[tuple[str | None, str | None], list[Result]] = {}
        for result in record.results if record.kind == "measured" else []:
            if result.experiment == experiment:
                groups.setdefault((result.scale, result.device), []).append(result)
        for (scale, device), results in groups.items():
            verb = "counted" if device == "meta" else "measured"
            where = ", ".join(filter(None, [scale, device.upper() if device and device != "meta" else None]))
            source = Source("measured", f"{verb} ({where})" if where else verb, record, results)
            other = best.get((scale, device))
            if other is None or _count(source) >= _count(other):
                best[scale, device] = source
    return [source for source in best.values() if _count(source)]


def _count(source: Source) -> int:
    return sum(result.status == "measured" for result in source.results)
