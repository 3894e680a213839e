"""Accuracy tables: errors over seeds, beside the published, and whether two rows reach the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from msgspec.structs import replace

from reproduce.experiments import EXPERIMENTS, AccuracyRow
from reproduce.records.record import Result
from reproduce.run.training import size_names
from reproduce.tables.accuracy import Error, accuracy_tables, compare, final_error
from reproduce.tables.layout import WIDTH, Table

EXPERIMENT = EXPERIMENTS["resnet101-accuracy"]


def result(row: AccuracyRow, scale: str, errors: Sequence[Sequence[float]], **more: object) -> Result:
    """Return a row's result, given the errors of every epoch of each seed."""
    config = row.config(size_names(row.model))
    samples = {
        "seed": [float(seed) for seed, series in enumerate(errors) for _ in series],
        "epoch": [epoch + 1.0 for series in errors for epoch in range(len(series))],
        "top1_error": [error for series in errors for error in series],
        "epoch_time": [2.0 for series in errors for _ in series],
    }
    base = Result(
        EXPERIMENT.name, row.name, "measured", scale, "cpu", config,
        over=row.over,
        published=None if row.published is None else f"{EXPERIMENT.table}/{row.published}",
        values={"samples_per_epoch": 1000},
        samples=samples if errors else {},
    )  # fmt: skip
    return replace(base, **more)  # type: ignore[arg-type]


def curves(row: AccuracyRow, last: Sequence[float]) -> list[list[float]]:
    return [[90.0] * (row.recipe.epochs - 1) + [error] for error in last]


def tables(scale: str, last: Mapping[str, Sequence[float] | Result]) -> list[Table]:
    """Return the tables of rows whose seeds end at these errors; a row without any needs devices."""
    results = []
    for row in EXPERIMENT.scale(scale).rows:
        given = last.get(row.name)
        if isinstance(given, Result):
            results.append(given)
        elif given is None:
            results.append(result(row, scale, [], status="needs devices", reason=f"needs {row.devices} devices"))
        else:
            results.append(result(row, scale, curves(row, given)))
    return accuracy_tables(EXPERIMENT, results)


def row(name: str, scale: str = "small") -> AccuracyRow:
    (found,) = [row for row in EXPERIMENT.scale(scale).rows if row.name == name]
    return found


@pytest.mark.parametrize(
    ("found", "expected", "allowed", "verdict"),
    [
        (Error(22.0, 0.1), Error(22.2, 0.1), 0.2, "same"),
        (Error(22.0, 0.1), Error(22.3, 0.1), 0.2, "differs"),
        (Error(22.5, 0.1), Error(22.2, 0.1), 0.2, "differs"),
        (Error(22.0, 0.0), Error(22.0, 0.0), 0.0, "same"),
        (Error(22.0), Error(22.0, 0.1), None, ""),
        (Error(22.0), Error(22.0), None, ""),
    ],
)
def test_the_same_within_the_spread(found: Error, expected: Error, allowed: float | None, verdict: str) -> None:
    compared = compare(found, expected)
    assert compared.allowed == (None if allowed is None else pytest.approx(allowed))
    assert (compared.verdict, compared.difference) == (verdict, pytest.approx(found.mean - expected.mean))


def test_only_trainings_that_came_to_their_end_count() -> None:
    plain = row("plain")
    assert final_error(result(plain, "small", [*curves(plain, [10.0, 14.0]), [5.0]])) == pytest.approx((12, 8**0.5))
    assert final_error(result(plain, "small", curves(plain, [10.0]))) == Error(10.0)
    assert final_error(result(plain, "small", [[5.0]])) is None


def test_small() -> None:
    reached, trained = tables("small", {
        "plain": [10, 12, 14],
        "GPipe n2m2": [13, 12, 14],
        "GPipe n2m4": replace(result(row("GPipe n2m4"), "small", curves(row("GPipe n2m4"), [20, 21, 22])),
                              values={"samples_per_epoch": 1000, "running_statistics_difference": [2e-7, 4e-7]}),
    })  # fmt: skip
    assert [list(cells) for cells in reached.rows] == [
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
    rows = {cells[0]: list(cells[1:]) for cells in reached.rows}
    assert len(rows) == 8
    assert rows["reference-8k"] == ["needs 256 devices", "", "", "", "22.36 +- 0.09"]
    assert rows["dataparallel-4k"][-1] == "out of memory"
    assert rows["pipeline-256"] == ["22.50", "+0.50", "", "", "21.99 +- 0.13"]
    assert "one seed has no spread, and so no verdict: train more by --seeds K" in reached.notes
    assert any("reference rows by Goyal et al., arXiv:1706.02677" in note for note in reached.notes)
    assert list(trained.rows[-2]) == ["pipeline-1k", "1024", "8", "64", "plain", "", "295", ""]
    assert list(trained.rows[2]) == ["dataparallel-256", "256", "2", "-", "plain", "500", "180", ""]


@pytest.mark.parametrize(
    ("status", "series", "cell"),
    [
        ("out of memory", [], "out of memory"),
        ("failed", [[3.0]], "failed"),
        ("not run", [], "not run"),
        ("measured", [[3.0, 2.0]], "epoch 2 of 6"),
    ],
)
def test_rows_that_have_not_come_to_their_end(status: str, series: list[list[float]], cell: str) -> None:
    broken = result(row("plain"), "small", series, status=status, reason="seed 0: no such luck")
    reached, _ = tables("small", {"plain": broken, "GPipe n2m2": [1, 2]})
    assert list(reached.rows[0][1:5]) == [cell, "", "", ""] and list(reached.rows[1][2:5]) == ["", "", ""]
    assert any("failed: plain: seed 0: no such luck" in note for note in reached.notes) == (status == "failed")


@pytest.mark.parametrize("scale", ["paper", "small"])
@pytest.mark.parametrize("last", [None, [99.99, 9.99, 0.0]])
def test_tables_fit_80_columns_and_are_ascii(scale: str, last: list[float] | None) -> None:
    given = {} if last is None else {row.name: last for row in EXPERIMENT.scale(scale).rows}
    for table in tables(scale, given):
        assert table.text().isascii() and max(map(len, table.text().splitlines())) <= WIDTH
