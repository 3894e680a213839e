"""Make the table of how far emulated speed-ups are from the published ones, from the records in results/measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import median
from typing import NamedTuple

from reproduce.experiments import EXPERIMENTS, LIKE_PUBLISHED, PUBLISHED_BALANCE
from reproduce.numbers.metrics import errors, speed_ups
from reproduce.records.published import published
from reproduce.records.record import Record
from reproduce.tables.layout import Column, Table, table

APART = 1.1  # the ratio from which on two published speed-ups differ


class Distance(NamedTuple):
    """How far a run's speed-ups over the first row are from the published ones.

    `errors` are shares of the published ones, by row; those `in_published_balance` are of the same rows with that
    balance. Of the `pairs` of rows whose published speed-ups differ by more than 10 %, so many stand in the published
    `order`.
    """

    experiment: str
    started: str
    errors: Mapping[str, float]
    in_published_balance: Mapping[str, float]
    order: int
    pairs: int

    @property
    def worst(self) -> str:
        """Give the row that is out by most."""
        return max(self.errors, key=lambda row: abs(self.errors[row]))


COLUMNS = [
    Column[Distance]("experiment", lambda found: found.experiment, left=True),
    Column[Distance]("run", lambda found: found.started[:16]),
    Column[Distance]("pairs in the\npublished order", lambda found: f"{found.order} of {found.pairs}"),
    Column[Distance]("median\nerror", lambda found: median(map(abs, found.errors.values())), "{:.1%}"),
    Column[Distance]("largest", lambda found: f"{found.errors[found.worst]:+.0%} ({found.worst})"),
    Column[Distance](
        "the same row in\nthe published balance",
        lambda found: found.in_published_balance.get(found.worst),
        "{:+.0%}",
        "not run",
    ),
]


def distance(record: Record, experiment: str) -> Distance | None:
    """Return how far the emulated rows like the published ones are; None where nobody published or ran all of them."""
    name = EXPERIMENTS[experiment].table
    if name is None or record.run is None:
        return None
    papers = published(name).results
    emulated = [each for each in record.results if each.experiment == experiment and each.status == "emulated"]
    like = [each for each in emulated if each.config["configuration"] == LIKE_PUBLISHED]
    if [each.row for each in like] != [paper.row for paper in papers]:
        return None
    again = [each for each in emulated if each.config["configuration"] == PUBLISHED_BALANCE]
    theirs = speed_ups(papers, papers[0])
    ours, in_theirs = speed_ups(like, like[0]), speed_ups(again, like[0])
    pairs = [(a, b) for a, b in combinations(theirs, 2) if abs(math.log(theirs[a] / theirs[b])) > math.log(APART)]
    order = sum((ours[a] > ours[b]) == (theirs[a] > theirs[b]) for a, b in pairs)
    off = errors(ours, theirs)
    del off[papers[0].row]
    return Distance(experiment, record.run.started, off, errors(in_theirs, theirs), order, len(pairs))


def distances(records: Sequence[Record]) -> Table:
    """Return the table of every run that has all rows of a published speed table."""
    names = [name for name, each in EXPERIMENTS.items() if each.measures == "speed"]
    found = [made for name in names for record in records if (made := distance(record, name))]
    rows = sorted(found, key=lambda each: (names.index(each.experiment), each.started))
    return table("How far emulated speed-ups are from the published ones", COLUMNS, rows)
