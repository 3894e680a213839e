"""Accuracy tables: errors over seeds, beside the published, and whether two rows reach the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from reproduce.experiments import EXPERIMENTS, AccuracyRow
from reproduce.records.record import Result
from reproduce.tables.accuracy import accuracy_tables
from reproduce.tables.layout import WIDTH, Table

EXPERIMENT = EXPERIMENTS["resnet101-accuracy"]
Given = Sequence[float] | Mapping[str, Any]


def result(row: AccuracyRow, scale: str, given: Given | None) -> Result:
    """Return a row's result: its seeds end at these errors, or it has these fields, or it needs devices."""
    fields: dict[str, Any] = {"status": "needs devices", "reason": f"needs {row.devices} devices"}
    if isinstance(given, Mapping):
        fields = dict(given)
    elif given is not None:
        fields = {"errors": [[90.0] * (row.recipe.epochs - 1) + [error] for error in given]}
    seeds = fields.pop("errors", [])
    samples = {
        "epoch": [epoch + 1.0 for errors in seeds for epoch in range(len(errors))],
        "top1_error": [error for errors in seeds for error in errors],
        "epoch_time": [2.0 for errors in seeds for _ in errors],
    }
    return Result(EXPERIMENT.name, row.name, fields.pop("status", "measured"), scale, "cpu", row.config(), row.over,
                  published=row.published and f"{EXPERIMENT.table}/{row.published}", samples=samples if seeds else {},
                  values={"samples_per_epoch": 1000, **fields.pop("values", {})}, **fields)  # fmt: skip


def tables(scale: str, given: Mapping[str, Given]) -> list[Table]:
    rows = EXPERIMENT.scale(scale).rows
    return accuracy_tables(EXPERIMENT, [result(row, scale, given.get(row.name)) for row in rows])  # type: ignore[arg-type]


def test_small() -> None:
    last = [[90.0] * 5 + [error] for error in (20, 21, 22)]
    differences = {"errors": last, "values": {"running_statistics_difference": [2e-7, 4e-7]}}
    reached, trained = tables("small", {"plain": [10, 12, 14], "GPipe n2m2": [13, 12, 14], "GPipe n2m4": differences})
    assert [list(row) for row in reached.rows] == [
        ["plain", "12.00 +- 2.00", "", "", "", "22.02 +- 0.11"],
        ["GPipe n2m2", "13.00 +- 1.00", "+1.00", "3.00", "same", ""],
        ["GPipe n2m4", "21.00 +- 1.00", "+9.00", "3.00", "differs", ""],
        ["plain BN n2m4", "needs 2 devices", "", "", "", "21.99 +- 0.13"],
        ["GPipe n8m4", "needs 8 devices", "", "", "", ""],
    ]
    assert list(trained.rows[2]) == ["GPipe n2m4", "128", "2", "4", "deferred", "500", "4e-07"]
    assert list(trained.rows[0]) == ["plain", "128", "1", "-", "plain", "500", ""]
    notes = " ".join(reached.notes)
    assert "ResNet on gratings, 6 epochs; mean +- standard deviation over 3 seeds" in notes
    assert "over base: less the error of plain" in notes and "2 rows not run for want of devices" in notes
    assert "running statistics: largest relative difference" in " ".join(trained.notes)


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
        ("failed", [[3.0]], "failed"),
        ("not run", [], "not run"),
        ("measured", [[3.0, 2.0]], "epoch 2 of 6"),
    ],
)
def test_rows_that_have_not_come_to_their_end(status: str, errors: list[list[float]], cell: str) -> None:
    broken = {"status": status, "errors": errors, "reason": "seed 0: no such luck"}
    reached, _ = tables("small", {"plain": broken, "GPipe n2m2": [1, 2]})
    assert [row[1] for row in reached.rows[:2]] == [cell, "1.50 +- 0.71"] and "verdict" not in reached.headings
    assert ("failed: plain: seed 0: no such luck" in reached.notes) == (status == "failed")


@pytest.mark.parametrize("scale", ["paper", "small"])
@pytest.mark.parametrize("last", [None, [99.99, 9.99, 0.0]])
def test_tables_fit_80_columns_and_are_ascii(scale: str, last: list[float] | None) -> None:
    for table in tables(scale, {row.name: last for row in EXPERIMENT.scale(scale).rows if last}):
        assert table.text().isascii() and max(map(len, table.text().splitlines())) <= WIDTH
