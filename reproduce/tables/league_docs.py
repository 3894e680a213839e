"""Make the tables of docs/league.md: predictions of what others published, from the records in results/league."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

from reproduce.error import Error
from reproduce.records.record import Record, load
from reproduce.tables.layout import Table

__all__ = ["league_block"]


class _Row(NamedTuple):
    name: str
    devices: int
    chunks: int
    published: float
    predicted: float
    ratio: float | None
    """How far the ratio of its throughput to another row's is off."""

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


def league_block(root: Path, name: str) -> str:
    """Return the table of the publication `name` as Markdown, without its heading; or the `summary` of all of them.

    `first` is the summary of the first predictions, which were made before efficiencies were changed once.

    Raises:
        Error: there is no such table.
    """
    folder = root / "results" / "league"
    tables = {record.name: (record, rows) for record, rows in _tables(folder / "first" if name == "first" else folder)}
    if name in ("summary", "first"):
        made = _summary({record.title: rows for record, rows in tables.values()})
    elif name in tables:
        made = _publication(*tables[name])
    else:
        raise Error(f"a block is from league/{name}; after the slash name one of summary, first, {', '.join(tables)}")
    return f"\n{made.markdown().partition(chr(10) * 2)[2].strip()}\n\n"


def _tables(folder: Path) -> Iterator[tuple[Record, list[_Row]]]:
    """Yield the published tables that a folder has predictions of; they are there, or in the folder above."""
    for path in sorted(folder.glob("*-predicted.json")):
        name = path.name.replace("-predicted", "")
        published = load(folder / name if (folder / name).exists() else folder.parent / name)
        predicted = {result.row: result.values["throughput"] for result in load(path).results}
        given = {result.row: result.values["throughput"] for result in published.results}
        rows = []
        for result in published.results:
            config, here, over = result.config, result.row, result.over
            off = None if over is None else predicted[here] / predicted[over] / (given[here] / given[over]) - 1
            devices = config["partitions"] * config["replicas"]
            rows.append(_Row(here, devices, config["chunks"], given[here], predicted[here], off))
        yield published, rows


def _publication(record: Record, rows: list[_Row]) -> Table:
    cells = [
        [
            row.name,
            str(row.devices),
            str(row.chunks),
            f"{row.published:.4g}",
            f"{row.predicted:.4g}",
            f"{row.error:+.0%}",
            "" if row.ratio is None else f"{row.ratio:+.0%}",
        ]
        for row in rows
    ]
    headings = ["row", "devices", "micro-batches", "samples/s published", "predicted", "error", "error of the ratio"]
    over = dict.fromkeys(result.over for result in record.results if result.over is not None)
    notes = [
        f"published: {(record.source or {}).get('where')}",
        *([f"ratio: to {', '.join(over)}"] if over else []),
        *record.notes,
    ]
    return Table(record.title, headings, cells, notes)


def _summary(tables: dict[str, list[_Row]]) -> Table:
    headings = ["table", "rows", "samples/s: median error", "largest", "ratios", "median error", "within 10%"]
    everything = [row for rows in tables.values() for row in rows]
    cells = []
    for title, rows in {**tables, "all": everything}.items():
        errors = [abs(row.error) for row in rows]
        ratios = [abs(row.ratio) for row in rows if row.ratio is not None]
        within = sum(ratio <= 0.1 for ratio in ratios)
        shown = [f"{median(ratios):.1%}", f"{within} of {len(ratios)}"] if ratios else ["", ""]
        cells.append([title, str(len(rows)), f"{median(errors):.1%}", f"{max(errors):.1%}", str(len(ratios)), *shown])
    return Table("How far predictions are from other publications", headings, cells)
