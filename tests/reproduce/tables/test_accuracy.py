"""Accuracy tables beside the published one; `render --check` holds those of the small scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from reproduce.experiments import EXPERIMENTS
from reproduce.records.record import Result
from reproduce.tables.accuracy import accuracy_tables
from reproduce.tables.layout import WIDTH, Table

EXPERIMENT = EXPERIMENTS["resnet101-accuracy"]


def tables(scale: str, given: Mapping[str, Sequence[float]], status: str = "measured", epochs: int = 90) -> list[Table]:
    """Return the tables of rows that have this status, and the error of each seed after so many epochs, or all.

    Rows that are not given need devices.
    """
    results = []
    for row in EXPERIMENT.scale(scale).rows:
        config, errors = row.config(), given.get(row.name)
        count = min(epochs, config["epochs"])
        samples = {
            "epoch": [epoch + 1.0 for _ in errors or () for epoch in range(count)],
            "top1_error": [error for last in errors or () for error in [90.0] * (count - 1) + [last]],
            "epoch_time": [2.0] * count * len(errors or ()),
        }
        ended, reason = ("needs devices", f"needs {row.devices} devices") if errors is None else (status, "no luck")
        published = row.published and f"{EXPERIMENT.table}/{row.published}"
        results.append(
            Result(EXPERIMENT.name, row.name, ended, scale, "cpu", config, row.over, published, reason,  # type: ignore[arg-type]
                   samples=samples if errors else {}, values={"samples_per_epoch": 1000})
        )  # fmt: skip
    made = accuracy_tables(EXPERIMENT, results)
    assert all(table.text().isascii() and max(map(len, table.text().splitlines())) <= WIDTH for table in made)
    return made


def test_paper() -> None:
    reached, trained = tables("paper", {"dataparallel-256": [22.0], "pipeline-256": [22.5]})
    rows = {row[0]: list(row[1:]) for row in reached.rows}
    assert len(rows) == 8
    assert rows["reference-8k"] == ["needs 256 devices", "", "22.36 +- 0.09"]
    assert rows["dataparallel-4k"][-1] == "out of memory"
    assert rows["pipeline-256"] == ["22.50", "+0.50", "21.99 +- 0.13"]
    assert "one seed has no spread, and so no verdict: train more by --seeds K" in reached.notes
    assert any("reference rows by Goyal et al., arXiv:1706.02677" in note for note in reached.notes)
    assert list(trained.rows[-2]) == ["pipeline-1k", "1024", "8", "64", "plain", "", "295"]
    assert list(trained.rows[2]) == ["dataparallel-256", "256", "2", "-", "plain", "500", "180"]


@pytest.mark.parametrize(
    ("status", "errors", "cell"),
    [
        ("out of memory", [], "out of memory"),
        ("failed", [3.0], "failed"),
        ("not run", [], "not run"),
        ("measured", [3.0], "epoch 2 of 6"),
    ],
)
def test_rows_that_have_not_come_to_their_end(status: str, errors: list[float], cell: str) -> None:
    reached, _ = tables("small", {"plain": errors, "GPipe n2m2": errors}, status, epochs=2)
    assert [row[1] for row in reached.rows[:3]] == [cell, cell, "needs 2 devices"]
    assert "verdict" not in reached.headings
    assert ("failed: plain, GPipe n2m2: no luck" in reached.notes) == (status == "failed")


def test_two_rows_over_their_seeds() -> None:
    reached, _ = tables("small", {"plain": [10, 12, 14], "GPipe n2m2": [13, 12, 14], "GPipe n2m4": [20, 21, 22]})
    assert list(reached.rows[1]) == ["GPipe n2m2", "13.00 +- 1.00", "+1.00", "3.00", "same", ""]
    assert list(reached.rows[2]) == ["GPipe n2m4", "21.00 +- 1.00", "+9.00", "3.00", "differs", ""]
