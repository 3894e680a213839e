"""Subjects: every experiment has its published, predicted and measured rows, and the run that says most of it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from reproduce.records.record import Record, Result
from reproduce.report.subjects import find_subjects

from .conftest import RUN, TABLES, subject

LINK = "tg-amoebanetd-speed/n2m4"


@pytest.mark.parametrize(("experiment", "table"), TABLES.items())
def test_sources_of_every_experiment(experiment: str, table: str, everything: list[Record]) -> None:
    assert subject(everything, experiment).table == table
    labels = [source.label for source in subject(everything, experiment).sources]
    run = [label for label in labels if label != "predicted (a<b)"]
    assert run == ["published", "measured (small, CUDA)", "emulated (small, CUDA)"][: 3 - experiment.endswith("memory")]
    assert ("predicted (a<b)" in labels) == experiment.endswith(("speed", "ablation"))


def test_every_published_table_is_somewhere(paper: list[Record], everything: list[Record]) -> None:
    for records in (paper, everything):
        sources = [source for each in find_subjects(records) for source in each.sources if source.kind == "published"]
        assert sorted(source.record.name for source in sources) == sorted(record.name for record in paper)


def run(started: str, *steps: int, **changes: object) -> Record:
    """Make a run of rows with so many steps each."""
    results = [
        Result("e", f"x{i}", "measured" if count else "failed", "small", "cpu", published=LINK,
               samples={"step_time": [1.0] * count})
        for i, count in enumerate(steps)
    ]  # fmt: skip
    results = [replace(result, **changes) for result in results]
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
    others = [replace(result, status="emulated", emulated=True) for result in both.results]
    only = subject([replace(both, results=[*both.results, *others])], "e")
    assert [(source.kind, source.label) for source in only.sources] == [
        ("measured", "measured (small, CPU)"),
        ("emulated", "emulated (small, CPU)"),
    ]
    for source in only.sources:
        entry = only.find(source, "n2m4")
        assert entry is not None and entry.result.emulated == (source.kind == "emulated")
