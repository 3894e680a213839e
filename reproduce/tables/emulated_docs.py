"""Make the table of how far emulated speed-ups are from the published ones, from the records in results/measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import median
from typing import NamedTuple

from reproduce.experiments import EXPERIMENTS, LIKE_PUBLISHED, PUBLISHED_BALANCE
from reproduce.numbers.metrics import speed_up
from reproduce.records.published import published
from reproduce.records.record import Record
from reproduce.tables.layout import Table

APART = 1.1  # the ratio from which on two published speed-ups differ


class Distance(NamedTuple):
    """How far a run's speed-ups over the first row are from the published ones.

    `errors` are shares of the published ones, by row; those `in_published_balance` are of the same rows with that
    balance. Of the `pairs` of rows whose published speed-ups differ by more than 10 %, so many stand in the published
    `order`.
    """

    errors: Mapping[str, float]
    in_published_balance: Mapping[str, float]
    order: int
    pairs: int


def distance(record: Record, experiment: str) -> Distance | None:
    """Return how far the emulated rows like the published ones are; None where nobody published or ran all of them."""
    table = EXPERIMENTS[experiment].table
    if table is None:
        return None
    papers = {paper.row: paper for paper in published(table).results}
    rows = {
        result.row: result
        for result in record.results
        if result.experiment == experiment
        and result.status == "emulated"
        and result.config["configuration"] == LIKE_PUBLISHED
    }
    if list(rows) != list(papers):
        return None
    first = next(iter(papers))
    ours = {name: reading.middle for name, row in rows.items() if (reading := speed_up(row, rows[first]))}
    theirs = {name: reading.middle for name, row in papers.items() if (reading := speed_up(row, papers[first]))}
    pairs = [(a, b) for a, b in combinations(papers, 2) if abs(math.log(theirs[a] / theirs[b])) > math.log(APART)]
    order = sum((ours[a] > ours[b]) == (theirs[a] > theirs[b]) for a, b in pairs)
    again = {
        result.row.partition("/")[0]: reading.middle
        for result in record.results
        if result.experiment == experiment
        and result.status == "emulated"
        and result.config["configuration"] == PUBLISHED_BALANCE
        and (reading := speed_up(result, rows[first]))
    }
    errors, in_theirs = (
        {name: times / theirs[name] - 1 for name, times in of.items() if name != first} for of in (ours, again)
    )
    return Distance(errors, in_theirs, order, len(pairs))


def distances(records: Sequence[Record]) -> Table:
    """Return the table of every run that has all rows of a published speed table."""
    lines = []
    for experiment in (name for name, each in EXPERIMENTS.items() if each.measures == "speed"):
        for record in sorted(records, key=lambda record: record.run.started if record.run else ""):
            found = distance(record, experiment)
            if found is not None and record.run is not None:
                off = {name: abs(error) for name, error in found.errors.items()}
                worst = max(off, key=lambda name: off[name])
                again = found.in_published_balance.get(worst)
                shown = (
                    f"{median(off.values()):.1%}",
                    f"{found.errors[worst]:+.0%} ({worst})",
                    "not run" if again is None else f"{again:+.0%}",
                )
                lines.append([experiment, record.run.started[:16], f"{found.order} of {found.pairs}", *shown])
    headings = [
        "experiment",
        "run",
        "pairs in the\npublished order",
        "median\nerror",
        "largest",
        "the same row in\nthe published balance",
    ]
    return Table("How far emulated speed-ups are from the published ones", headings, lines)
