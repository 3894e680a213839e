"""Compare: what is fair to compare is, what is not becomes ratios, and what is missing is named."""

from __future__ import annotations

from typing import Any

import pytest

from reproduce.machine.description import Machine
from reproduce.numbers.compare import Comparison, compare, verdict
from reproduce.numbers.match import match
from reproduce.numbers.significance import Decision, Rule
from reproduce.numbers.sources import side_of
from reproduce.records.record import Record

from ..made import emulated, record, row


def compared(*sides: Record, **options: Any) -> tuple[list[Comparison], list[str]]:
    loaded = [side_of(letter, letter, [record]) for letter, record in zip("ABCD", sides, strict=False)]
    return compare(loaded, match(loaded), **{"metric": None, "rule": Rule(), **options})


def only(*sides: Record, **options: Any) -> Comparison:
    (comparison,), notes = compared(*sides, **options)
    assert not notes
    return comparison


def ratios(comparison: Comparison, side: int = 1) -> dict[str, Any]:
    """Return each row's ratio and verdict."""
    decisions = {row.line.label: row.decisions[side] for row in comparison.rows}
    return {
        label: each and (round(each.ratio, 3), verdict(each, comparison.metric)) for label, each in decisions.items()
    }


@pytest.mark.parametrize(
    ("new", "ratio", "verdict"),
    [
        ([0.8] * 8, 1.25, "better"),
        ([1.25] * 8, 0.8, "worse"),
        ([1.03] * 8, 0.971, "~"),  # significant, but a trifle
        ([0.25, 0.5, 1.0, 2.0, 4.0], 1.0, "~"),
        ([2.0] * 4, 0.5, "too few"),
    ],
)
def test_less_time_is_better_as_more_throughput_is(new: list[float], ratio: float, verdict: str) -> None:
    sides = record(row("x", [1.0] * len(new))), record(row("x", new))
    comparison = only(*sides)
    assert (comparison.metric, comparison.unit, comparison.relative) == ("throughput", "samples/s", False)
    assert ratios(comparison) == {"x": (ratio, verdict)}
    assert ratios(only(*sides, metric="time")) == {"x": (pytest.approx(1 / ratio, abs=1e-3), verdict)}


@pytest.mark.parametrize(
    ("outcome", "metric", "expected"),
    [
        ("higher", "throughput", "better"),
        ("higher", "memory", "worse"),
        ("lower", "top1_error", "better"),
        ("higher", "parameters", "differs"),
        ("untested", "time", "untested"),
    ],
)
def test_what_a_decision_means(outcome: Any, metric: str, expected: str) -> None:
    assert verdict(Decision(outcome, 1.0), metric) == expected


@pytest.mark.parametrize("metric", ["throughput", "speedup"])
def test_an_emulated_row_is_divided_by_an_emulated_one(metric: str) -> None:
    def side(cpu: str, **seconds: float) -> Record:
        rows = [row(name, each, over="x") for name, each in seconds.items()]
        return record(*rows, *(emulated(row(name, each / 2 if name == "x" else each, over="x"))
                               for name, each in seconds.items()), cpu=cpu)  # fmt: skip

    comparison = only(side("a CPU", x=4.0, y=1.0), side("another CPU", x=4.0, y=1.0), metric=metric)
    assert comparison.relative
    ours = {each.line.label: each.readings[0] and round(each.readings[0].middle, 3) for each in comparison.rows}
    assert ours == {"x": 1, "y": 4, "x (emulated)": 1, "y (emulated)": 2}


def test_several_sides_are_each_compared_with_the_first() -> None:
    comparison = only(*(record(row("x", seconds), row("y", 1.0)) for seconds in (1.0, 0.25, 4.0)))
    assert ratios(comparison, 0) == {"x": None, "y": None} and comparison.mean(0) is None
    assert ratios(comparison, 1) == {"x": (4.0, "better"), "y": (1.0, "~")}
    assert comparison.mean(1) == pytest.approx((2, 2)) and comparison.mean(2) == pytest.approx((0.5, 2))


# The second machine is twice as fast, and `y` lags behind on it: 3 times as fast as x, then 2 times.
TWO_MACHINES = (
    record(row("x", 3.0, over="x"), row("y", 1.0, over="x")),
    record(row("x", 1.5, over="x"), row("y", 0.75, over="x"), cpu="another CPU"),
)


def test_absolute_times_of_different_machines_are_not_compared() -> None:
    comparison = only(*TWO_MACHINES)
    assert comparison.relative and ratios(comparison) == {"x": None, "y": (0.667, "worse")}
    assert [row.base for row in comparison.rows] == [True, False]
    assert comparison.notes == [
        "each side's throughput is divided by its own x",
        "absolute numbers are not compared: the sides ran on different machines",
    ]
    assert comparison.mean(1) == pytest.approx((2 / 3, 1)), "the row divided by is 1 by construction, and left out"


def test_force_compares_them_and_says_so() -> None:
    comparison = only(*TWO_MACHINES, force=True)
    assert not comparison.relative and ratios(comparison) == {"x": (2.0, "better"), "y": (1.333, "better")}
    assert comparison.notes == ["FORCED: absolute numbers are compared although the sides ran on different machines"]


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
def test_what_makes_a_machine_another(change: dict[str, Any], relative: bool) -> None:
    comparison = only(record(row("x", 1.0)), record(row("x", 1.0), **change))
    assert comparison.relative == relative
    assert ("torch differs: 2.11.0 / 2.12.0" in comparison.notes) == ("torch" in change)


@pytest.mark.parametrize(
    ("rows", "bases"),
    [
        ("xyz", {"x": "z", "y": "z", "z": "z"}),  # all name z
        ("xy", {"x": "x", "y": "x", "z": "z"}),  # the third side lacks z, so the first row that all have
    ],
)
def test_what_rows_are_divided_by(rows: str, bases: dict[str, str]) -> None:
    seconds = {"x": 2.0, "y": 3.0, "z": 4.0}
    old, new = ([row(name, seconds[name], over="z") for name in names] for names in ("xyz", rows))
    for each in only(record(*old), record(*old), record(*new), metric="speedup").rows:
        label = each.line.label
        readings = [reading.middle for reading in each.readings if reading is not None]
        assert readings == pytest.approx([seconds[bases[label]] / seconds[label]] * len(each.line.entries))


def test_speed_up_is_taken_within_sides_and_rounds() -> None:
    """A drift that slows whole rounds down leaves their ratios alone."""
    drift = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    sides = [
        record(row("x", drift, over="x"), row("y", [step / factor for step in drift], over="x")) for factor in (2, 1.5)
    ]
    assert ratios(only(*sides, metric="speedup")) == {"x": None, "y": (0.75, "worse")}
    assert ratios(only(*sides))["y"] == (0.75, "~"), "which absolute numbers cannot show"


def test_memory_does_not_depend_on_the_machine() -> None:
    sides = [record(row("x", values={"peak_allocated": peak}), cpu=cpu) for cpu, peak in (("a", [1, 3]), ("b", [4, 4]))]
    comparison = only(*sides)
    assert (comparison.metric, comparison.unit, comparison.relative) == ("memory", "bytes", False)
    assert ratios(comparison) == {"x": (2.0, "untested")}, "a single number each proves nothing"


@pytest.mark.parametrize(
    ("units", "sizes"), [(("GB", "GiB"), (1.0, 1.0)), (("GB", "GB"), (0.0, 1.0))], ids=["another unit", "zero"]
)
def test_what_has_no_ratio(units: tuple[str, str], sizes: tuple[float, float]) -> None:
    sides = [
        Record("r", "T", "measured", {"size": unit}, [row("x", values={"size": size})])
        for unit, size in zip(units, sizes, strict=True)
    ]
    assert ratios(only(*sides, metric="size")) == {"x": None}


def test_what_is_missing_is_named() -> None:
    lacking = row("z", status="needs devices", reason="needs 8 devices")
    comparison = only(
        record(row("x", 1.0), row("y", 1.0), lacking),
        record(row("x", 1.0), row("w", 1.0), lacking, row("y", status="out of memory")),
    )
    assert comparison.notes == [
        "no number (out of memory) in B: y",
        "no number (needs 8 devices) in A and B: z",
        "missing in A: w",
    ]
    assert list(ratios(comparison)) == ["x"]


@pytest.mark.parametrize(
    ("rows", "metric", "notes"),
    [
        ([], None, ["only in A: e (2 rows), f (1 row)"]),
        ([row("x", values={"loss": 1.0})], None,
         ["e: no row has the same metric on two sides: A has throughput, time, speedup, step_time, round; B has loss",
          "only in A: f (1 row)"]),
        ([row("x", 1.0)], "loss", ["e: loss is not on two sides of any row", "only in A: f (1 row)"]),
    ],
)  # fmt: skip
def test_experiments_without_a_table(rows: list[Any], metric: str | None, notes: list[str]) -> None:
    first = record(row("x", 1.0), row("y", 1.0), row("x", 1.0, experiment="f"))
    assert compared(first, record(*rows), metric=metric) == ([], notes)
