"""Subjects: every experiment has its published, predicted and measured rows, and the run that says most of it."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from reproduce.records.record import Record
from reproduce.report.subjects import find_subjects

from ..made import emulated, row
from .conftest import RUN

LINK = "tg-amoebanetd-speed/n2m4"


def test_every_published_table_is_somewhere(paper: list[Record], everything: list[Record]) -> None:
    for records in (paper, everything):
        sources = [source for each in find_subjects(records) for source in each.sources if source.kind == "published"]
        assert sorted(source.record.name for source in sources) == sorted(record.name for record in paper)


def run(started: str, *steps: int, **changes: Any) -> Record:
    """Make a run of rows with so many steps each."""
    results = [
        row(f"x{i}", [1.0] * count, **{"status": "measured" if count else "failed", "published": LINK, **changes})
        for i, count in enumerate(steps)
    ]
    return Record(f"run {started}", "T", "measured", {}, results, run=replace(RUN, started=started))


@pytest.mark.parametrize(
    ("runs", "best"),
    [
        ([run("2020", 1, 1), run("2021", 1, 1)], ["run 2021"]),
        ([run("2021", 1, 1), run("2020", 1, 1)], ["run 2021"]),
        ([run("2020", 1, 1), run("2021", 1)], ["run 2020"]),  # a run of a single row does not hide the whole table
        ([run("2020", 1, 1), run("2021", 1, 0)], ["run 2020"]),
        ([run("2020", 0)], []),
        ([run("2020", 1), run("2021", 1, device="cuda")], ["run 2020", "run 2021"]),
        ([run("2020", 1), run("2021", 1, scale="paper")], ["run 2020", "run 2021"]),
        ([run("2020", 1), run("2021", 1, emulated=True, status="emulated")], ["run 2020", "run 2021"]),
        ([run("2020", 1), run("2021", 1, engine="ranks")], ["run 2020", "run 2021"]),
    ],
)
def test_the_run_that_ran_most(runs: list[Record], best: list[str]) -> None:
    assert [source.record.name for each in find_subjects(runs) for source in each.sources] == best


def test_emulated_rows_are_a_source_of_their_own() -> None:
    both = run("2020", 1, 1)
    (only,) = find_subjects([replace(both, results=[*both.results, *map(emulated, both.results)])])
    found = [(source.kind, source.label, only.find(source, "n2m4")) for source in only.sources]
    assert [(*names, entry and entry.result.emulated) for *names, entry in found] == [
        ("measured", "measured (small, CPU)", False),
        ("emulated", "emulated (small, CPU)", True),
    ]
