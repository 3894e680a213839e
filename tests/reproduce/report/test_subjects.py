"""Subjects: every experiment finds its published, predicted and measured rows, and the run that says most of it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from reproduce.records.record import Record, Result
from reproduce.report.subjects import Subject, find_subjects

from .conftest import RUN, TABLES

LINK = "tg-amoebanetd-speed/n2m4"


def subject(records: list[Record], name: str) -> Subject:
    (found,) = (each for each in find_subjects(records) if each.name == name)
    return found


@pytest.mark.parametrize(("experiment", "table"), TABLES.items())
def test_sources_of_every_experiment(experiment: str, table: str, everything: list[Record]) -> None:
    found = subject(everything, experiment)
    assert found.table == table and found.published is not None
    assert [source.label for source in found.measured] == ["measured (small, CUDA)"]
    predicted = [source.label for source in found.sources if source.kind == "predicted"]
    assert predicted in (["predicted (a<b)"], [])


def test_every_published_table_is_somewhere(paper: list[Record], everything: list[Record]) -> None:
    for records in (paper, everything):
        shown = [
            source.record.name
            for each in find_subjects(records)
            for source in each.sources
            if source.kind == "published"
        ]
        assert sorted(shown) == sorted(record.name for record in paper)


def run(started: str, *steps: int, row: str = "x", **changes: object) -> Record:
    """Make a run of rows with so many steps each."""
    results = []
    for i, count in enumerate(steps):
        base = Result("e", f"{row}{i}", "measured" if count else "failed", "small", "cpu", published=LINK)
        results.append(replace(base, samples={"step_time": [1.0] * count}))
    results = [replace(result, **changes) for result in results]  # type: ignore[arg-type]
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
    ],
)
def test_the_run_that_measured_most(runs: list[Record], best: list[str]) -> None:
    found = [each for each in find_subjects(runs) if each.name == "e"]
    assert [source.record.name for each in found for source in each.measured] == best


def test_controls_do_not_stand_for_a_published_pipeline() -> None:
    record = run("2020", 1, 1)
    naive, gpipe = record.results
    record = replace(record, results=[replace(naive, config={"configuration": "naive"}), gpipe])
    (source,) = subject([record], "e").measured
    entry = source.find("n2m4", LINK)
    assert entry is not None and entry.result.row == "x1"
