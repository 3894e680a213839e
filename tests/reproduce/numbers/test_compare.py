"""Compare: what is fair to compare is, what is not becomes ratios, and what is missing is told."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from reproduce.machine.description import Machine
from reproduce.numbers.compare import Comparison, compare, verdict
from reproduce.numbers.match import match
from reproduce.numbers.significance import Decision, Rule
from reproduce.numbers.sources import side_of
from reproduce.records.record import Record, Result

Make = Callable[..., Record]
MakeRow = Callable[..., Result]


def compared(*sides: Record, **options: Any) -> tuple[list[Comparison], list[str]]:
    loaded = [side_of(letter, letter, [record]) for letter, record in zip("ABCD", sides, strict=False)]
    return compare(loaded, match(loaded), **{"metric": None, "rule": Rule(), **options})


def only(*sides: Record, **options: Any) -> Comparison:
    (found,), notes = compared(*sides, **options)
    assert not notes
    return found


def said(comparison: Comparison, side: int = 1) -> dict[str, str | None]:
    """Return the verdict on each row."""
    decisions = {row.line.label: row.decisions[side] for row in comparison.rows}
    return {label: None if each is None else verdict(each, comparison.metric) for label, each in decisions.items()}


def ratios(comparison: Comparison, side: int = 1) -> dict[str, float]:
    decisions = {row.line.label: row.decisions[side] for row in comparison.rows}
    return {label: round(each.ratio, 3) for label, each in decisions.items() if each is not None}


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        (1.0, 0.8, "better"),
        (1.0, 1.25, "worse"),
        (1.0, 1.001, "~"),
        (1.0, 1.03, "~"),  # significant, but a trifle
        ([1.0, 2.0, 3.0, 4.0, 5.0], [1.1, 2.2, 3.3, 4.4, 5.5], "~"),  # large, but not significant
        ([1.0] * 4, [2.0] * 4, "too few"),
    ],
)
def test_verdicts(
    old: float | Sequence[float], new: float | Sequence[float], verdict: str, record: Make, row: MakeRow
) -> None:
    found = only(record(row("x", old)), record(row("x", new)))
    assert (found.metric, found.relative, said(found)) == ("throughput", False, {"x": verdict})
    found = only(record(row("x", old)), record(row("x", new)), metric="time")
    assert said(found) == {"x": verdict}, "less time is better as more throughput is"


@pytest.mark.parametrize(
    ("outcome", "metric", "expected"),
    [
        ("higher", "throughput", "better"),
        ("lower", "throughput", "worse"),
        ("higher", "memory", "worse"),
        ("lower", "top1_error", "better"),
        ("higher", "parameters", "differs"),
        ("~", "memory", "~"),
        ("too few", "time", "too few"),
        ("untested", "time", "untested"),
    ],
)
def test_what_a_decision_means(outcome: Any, metric: str, expected: str) -> None:
    assert verdict(Decision(outcome, 1.0), metric) == expected


def test_the_geometric_mean(record: Make, row: MakeRow) -> None:
    found = only(record(row("x", 1.0), row("y", 1.0)), record(row("x", 0.5), row("y", 0.125)))
    mean, count = found.mean(1) or (0, 0)
    assert math.isclose(mean, 4) and count == 2
    assert found.mean(0) is None


def test_several_sides_are_each_compared_with_the_first(record: Make, row: MakeRow) -> None:
    found = only(record(row("x", 1.0)), record(row("x", 0.5)), record(row("x", 2.0)))
    assert [ratios(found, side) for side in (0, 1, 2)] == [{}, {"x": 2.0}, {"x": 0.5}]


def sides_on_two_machines(record: Make, row: MakeRow) -> list[Record]:
    """Let the second machine be twice as fast, and `y` lag behind on it: 3 times faster than x, then 2 times."""
    x, y = (row(name, 3.0, over="x") for name in ("x", "y"))
    old = record(x, replace(y, samples=row("y", 1.0).samples))
    new = record(row("x", 1.5, over="x"), row("y", 0.75, over="x"), cpu="another CPU")
    return [old, new]


def test_absolute_times_of_different_machines_are_not_compared(record: Make, row: MakeRow) -> None:
    found = only(*sides_on_two_machines(record, row))
    assert found.relative and said(found) == {"x": None, "y": "worse"} and ratios(found) == {"y": 0.667}
    assert [row.base for row in found.rows] == [True, False]
    assert found.notes[:2] == [
        "each side's throughput is divided by its own x",
        "absolute numbers are not compared: the sides ran on different machines",
    ]
    assert found.mean(1) == (pytest.approx(2 / 3), 1), "the row divided by is 1 by construction, and does not count"


def test_force_compares_them_and_says_so(record: Make, row: MakeRow) -> None:
    found = only(*sides_on_two_machines(record, row), force=True)
    assert not found.relative and ratios(found) == {"x": 2.0, "y": 1.333}
    assert found.notes[0] == ("FORCED: absolute numbers are compared although the sides ran on different machines")


@pytest.mark.parametrize(
    ("change", "relative"),
    [
        ({"cpu": "another CPU"}, True),
        ({"device": "cuda"}, True),
        ({"threads_per_device": 2}, True),
        ({"torch": "2.12.0"}, False),
        ({"devices": 8, "seed": 4}, False),
        ({"machine": Machine("Linux", "a CPU", 2, 2, 64 << 30)}, True),
        ({"machine": Machine("Linux", "a CPU", 2, 2, (8 << 30) + 4096)}, False),
    ],
)
def test_what_makes_a_machine_another(change: dict[str, Any], relative: bool, record: Make, row: MakeRow) -> None:
    found = only(record(row("x", 1.0)), record(row("x", 1.0), **change))
    assert found.relative == relative
    assert ("torch differs: 2.11.0 / 2.12.0" in found.notes) == ("torch" in change)


@pytest.mark.parametrize(
    ("rows", "bases"),
    [
        ("xyz", {"x": "z", "y": "z", "z": "z"}),  # all name z
        ("xy", {"x": "x", "y": "x", "z": "z"}),  # the third side lacks z, so the first row that all have
    ],
)
def test_what_rows_are_divided_by(rows: str, bases: dict[str, str], record: Make, row: MakeRow) -> None:
    seconds = {"x": 2.0, "y": 3.0, "z": 4.0}
    old, new = ([row(name, seconds[name], over="z") for name in names] for names in ("xyz", rows))
    found = only(record(*old), record(*old), record(*new), metric="speedup")
    for each in found.rows:
        label = each.line.label
        readings = [reading.middle for reading in each.readings if reading is not None]
        assert readings == pytest.approx([seconds[bases[label]] / seconds[label]] * len(each.line.entries))


def test_speed_up_is_taken_within_sides_and_rounds(record: Make, row: MakeRow) -> None:
    """A drift that slows whole rounds down leaves their ratios alone."""
    drift = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    sides = [
        record(row("x", drift, over="x"), row("y", [step / factor for step in drift], over="x")) for factor in (2, 1.5)
    ]
    found = only(*sides, metric="speedup")
    assert found.relative and ratios(found) == {"y": 0.75} and said(found)["y"] == "worse"
    assert said(only(*sides, metric="throughput"))["y"] == "~", "which absolute numbers cannot show"


def test_memory_does_not_depend_on_the_machine(record: Make, row: MakeRow) -> None:
    sides = [record(row("x", values={"peak_allocated": peak}), cpu=cpu) for cpu, peak in (("a", [1, 3]), ("b", [4, 4]))]
    found = only(*sides)
    assert (found.metric, found.unit, found.relative, ratios(found)) == ("memory", "bytes", False, {"x": 2.0})
    assert said(found) == {"x": "untested"}, "a single number each proves nothing"


def test_samples_against_a_published_number(record: Make, row: MakeRow) -> None:
    """The published number is taken as exact; whether ours differ from it is for the samples to say."""
    ours = record(row("x", 1.0, experiment="t"), row("y", 0.5, experiment="t", over="x"))
    results = [
        Result("t", name, "published", config={"row": name}, values={"throughput": number})
        for name, number in (("x", 10.0), ("y", 30.0))
    ]
    found = only(Record("t", "T", "published", {}, results), ours)
    assert found.relative and ratios(found) == {"y": 0.667} and said(found) == {"x": None, "y": "worse"}


def test_what_is_missing_is_told(record: Make, row: MakeRow) -> None:
    lacking = row("z", status="needs devices", reason="needs 8 devices")
    found = only(
        record(row("x", 1.0), row("y", 1.0), lacking),
        record(row("x", 1.0), row("w", 1.0), lacking, row("y", status="out of memory")),
    )
    assert found.notes == [
        "no number (out of memory) in B: y",
        "no number (needs 8 devices) in A and B: z",
        "missing in A: w",
    ]
    assert list(said(found)) == ["x"]


def test_experiments_of_one_side_are_named_together(record: Make, row: MakeRow) -> None:
    _, notes = compared(record(row("x", 1.0), row("y", 1.0), row("x", 1.0, experiment="f")), record())
    assert notes == ["only in A: e (2 rows), f (1 row)"]


def test_zeros_have_no_ratio(record: Make, row: MakeRow) -> None:
    sides = [record(row("x", values={"top1_error": error})) for error in (0.0, 1.0)]
    assert said(only(*sides)) == {"x": None}


def test_different_units_are_not_compared(row: MakeRow) -> None:
    sides = [Record("r", "T", "measured", {"size": unit}, [row("x", values={"size": 1.0})]) for unit in ("GB", "GiB")]
    assert said(only(*sides, metric="size")) == {"x": None}
