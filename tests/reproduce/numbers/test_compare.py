"""Tests of the comparison of records of benchmark results.

Records of one machine are compared by numbers; of several machines, by ratios to a baseline.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from reproduce.machine.description import Machine
from reproduce.numbers.compare import Asked, Comparison, compare, verdict
from reproduce.numbers.match import match
from reproduce.numbers.metrics import DISTURBED
from reproduce.numbers.notes import IN_TURN
from reproduce.numbers.significance import Decision, Rule
from reproduce.numbers.sources import side_of
from reproduce.records.record import Record

from ..made import emulated, record, row


def compared(*sides: Record, **options: Any) -> tuple[list[Comparison], list[str]]:
    loaded = []
    for letter, side in zip("ABCD", sides, strict=False):
        loaded.append(side_of(letter, letter, [side]))
    metric = options.pop("metric", None)
    asked = Asked(loaded, **{"rule": Rule(), **options})
    return compare(asked, match(loaded), metric)


def only(*sides: Record, **options: Any) -> Comparison:
    (comparison,), notes = compared(*sides, **options)
    assert not notes
    return comparison


def ratios(comparison: Comparison, side: int = 1) -> dict[str, Any]:
    """Return a dictionary: a line's label, and its ratio and verdict (`None` if not judged)."""
    found: dict[str, Any] = {}
    for each in comparison.rows:
        decision = each.decisions[side]
        label = each.line.label
        found[label] = None
        if decision is not None:
            found[label] = round(decision.ratio, 3), verdict(decision, comparison.metric)
    return found


@pytest.mark.parametrize(
    ("outcome", "metric", "expected"),
    [
        ("higher", "memory", "worse"),
        ("lower", "top1_error", "better"),
        ("higher", "parameters", "differs"),
    ],
)
def test_what_a_decision_means(outcome: Any, metric: str, expected: str) -> None:
    assert verdict(Decision(outcome, 1.0), metric) == expected


def emulated_too(x: float, **more: Any) -> Record:
    """Make a record in which the row y is faster than the row x (rows are configurations).

    The row y is four times as fast in the measured results, and twice as fast in the emulated ones.
    """
    x_measured, y_measured = row("x", x, over="x"), row("y", x / 4, over="x")
    x_emulated, y_emulated = emulated(row("x", 2.0, over="x")), emulated(row("y", 1.0, over="x"))
    return record(x_measured, y_measured, x_emulated, y_emulated, **more)


def drifting(factor: float) -> Record:
    """Make a record of rows x and y, whose steps become slower. Row y is `factor` times as fast."""
    slow = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    fast = [seconds / factor for seconds in slow]
    return record(row("x", slow, over="x"), row("y", fast, over="x"))


def size(unit: str, value: float) -> Record:
    rows = [row("x", values={"size": value})]
    return Record("r", "T", "measured", {"size": unit}, rows)


def peak(cpu: str, value: list[int]) -> Record:
    return record(row("x", values={"peak_allocated": value}), cpu=cpu)


X = row("x", 1.0)
ONE = record(X)


def of_rows(*seconds: float, **changes: Any) -> Record:
    """Make a record of rows x (the baseline), y, z and w, with the given seconds of a step."""
    rows = []
    for name, time in zip("xyzw", seconds, strict=False):
        rows.append(row(name, time, over="x"))
    return record(*rows, **changes)


# The second machine is twice as fast, but there `w` is only 2, not 3 times as fast as `x`.
TWO_MACHINES = [
    of_rows(3.0, 1.0, 1.0, 1.0),
    of_rows(1.5, 0.5, 0.5, 0.75, cpu="another CPU"),
]
HALF = [of_rows(1.0, 0.5, 0.5), of_rows(2.0, 1.0, 0.5, cpu="another CPU")]
SLOW_BASE = of_rows(1.2, 0.5, 0.5, 0.5)
X_DIFFERS = "x itself differs in B (0.83 times A's), so ratios to it are not judged"
LACKING = row("z", status="needs devices", reason="needs 8 devices")
NO_Y = row("y", status="out of memory")
ALONE = record(row("x", 1.0, others=[0.0]))
ALONE_LATER = record(row("x", 1.0, others=[0.0]), started="2021")
DISTURBED_LATER = record(row("x", 2.0, others=[0.2]), started="2021")
UNKNOWN = "how busy others kept the machine is not known"
RUNS_DIFFER = "the sides ran at different times: a verdict says that these runs differ, not why"
OVER_X = "each side's throughput is divided by its own x"
NOT_COMPARED = "absolute speed is not judged: the sides ran on different machines"
FORCED = "FORCED: absolute numbers are compared although the sides ran on different machines"
MISSING = [
    "no number (out of memory) in B: 1 row; --all names them",
    "no number (needs 8 devices) in A and B: 1 row; --all names them",
    "missing in A: 1 row; --all names them",
]
EMULATED: Any = {"x": None, "y": (1, "~"), "x (emulated)": None, "y (emulated)": (1, "~")}


def linked(link: str | None, size: int = 2, scale: str = "small") -> Record:
    """Make a record of rows (configurations) x, y and z. The arguments are settings of y and z."""
    rows = []
    for name in "yz":
        config = {"row": name, "link": link, "size": size}
        rows.append(row(name, 1.0, config=config, scale=scale))
    return record(X, *rows)


class Case(NamedTuple):
    """Two or more records to compare, and the expected result of the comparison."""

    sides: list[Record]
    expected: dict[str, Any]
    """The ratio and the verdict of each row."""
    notes: Sequence[str] = ()
    options: Mapping[str, Any] = {}
    relative: bool = False
    """Whether the numbers of each side are divided by those of the side's baseline row."""


COMPARED = {
    "less time is better": Case(
        [ONE, record(row("x", 0.5))], {"x": (0.5, "better")}, options={"metric": "time"}
    ),
    "as more throughput is": Case([ONE, record(row("x", 1.25))], {"x": (0.8, "worse")}),
    "absolute times of different machines": Case(
        TWO_MACHINES,
        {"x": None, "y": (1.0, "~"), "z": (1.0, "~"), "w": (0.667, "worse")},
        [OVER_X, NOT_COMPARED],
        relative=True,
    ),
    "a baseline that alone is slower": Case(
        [of_rows(1.0, 0.5, 0.5, 0.5), replace(SLOW_BASE, run=TWO_MACHINES[1].run)],
        {"x": None, **dict.fromkeys("yzw", (1.2, "base differs"))},
        [OVER_X, X_DIFFERS, NOT_COMPARED],
        relative=True,
    ),
    "on the same machine, too": Case(
        [of_rows(1.0, 0.5, 0.5, 0.5), SLOW_BASE],
        {"x": None, **dict.fromkeys("yzw", (1.2, "base differs"))},
        [OVER_X, X_DIFFERS],
        options={"metric": "speedup"},
        relative=True,
    ),
    "a baseline that half of the rows follow": Case(
        HALF,
        {"x": None, "y": (1.0, "base differs"), "z": (2.0, "base differs")},
        [OVER_X, X_DIFFERS.replace("0.83", "0.50"), NOT_COMPARED],
        relative=True,
    ),
    "a baseline that is as before": Case(
        [of_rows(1.0, 0.5, 0.5), of_rows(1.0, 0.6, 0.6, cpu="another CPU")],
        {"x": None, "y": (0.833, "worse"), "z": (0.833, "worse")},
        [OVER_X, NOT_COMPARED],
        relative=True,
    ),
    "by force": Case(
        TWO_MACHINES,
        {"x": (2.0, "better"), **dict.fromkeys("yz", (2.0, "better")), "w": (1.333, "better")},
        [FORCED],
        options={"force": True},
    ),
    "emulated rows over emulated ones": Case(
        [emulated_too(4.0), emulated_too(8.0, cpu="another CPU")],
        EMULATED,
        [f"{OVER_X}, x (emulated)", NOT_COMPARED],
        relative=True,
    ),
    "ratios in rounds": Case(
        [drifting(2), drifting(1.5)],
        {"x": None, "y": (0.75, "worse")},
        [OVER_X],
        options={"metric": "speedup"},
        relative=True,
    ),
    "which absolute numbers cannot show": Case(
        [drifting(2), drifting(1.5)], {"x": (1, "~"), "y": (0.75, "~")}
    ),
    "at different times": Case(
        [ONE, ALONE_LATER], {"x": (1.0, "~")}, [f"{RUNS_DIFFER}; {UNKNOWN} of A; {IN_TURN}"]
    ),
    "disturbed": Case(
        [ALONE, DISTURBED_LATER],
        {"x": (0.5, "disturbed")},
        [f"{RUNS_DIFFER}; {IN_TURN}", DISTURBED],
    ),
    "memory, which no machine changes": Case(
        [peak("a", [1, 3]), peak("b", [4, 4])], {"x": (2.0, "untested")}
    ),
    "another unit": Case(
        [size("GB", 1.0), size("GiB", 1.0)], {"x": None}, options={"metric": "size"}
    ),
    "two zeros": Case(
        [size("GB", 0.0), size("GB", 0.0)], {"x": (1.0, "~")}, options={"metric": "size"}
    ),
    "zero": Case([size("GB", 0.0), size("GB", 1.0)], {"x": None}, options={"metric": "size"}),
    "another scale, with the same sizes": Case(
        [ONE, record(row("x", 1.0, scale="paper"))],
        {"x": (1.0, "~")},
        ["scale differs: small / paper"],
    ),
    "another field": Case(
        [linked("p40x8"), linked("h100x8")],
        {"x": (1.0, "~")},
        ['A and B differ in link ("p40x8" / "h100x8"): 2 rows; --all names them'],
    ),
    "several fields, named": Case(
        [linked("p40x8"), linked(None, size=3, scale="paper")],
        {"x": (1.0, "~")},
        ["A and B differ in scale, link, size: y (small), z (small)"],
        options={"every": True},
    ),
    "what is missing": Case(
        [record(X, row("y", 1.0), LACKING), record(X, row("w", 1.0), LACKING, NO_Y)],
        {"x": (1.0, "~")},
        MISSING,
    ),
}
# Changes of the second record's run that make its machine a different machine.
OTHER_MACHINES: list[dict[str, Any]] = [
    {"cpu": "another CPU"},
    {"device": "cuda"},
    {"machine": Machine("Linux", "a CPU", 2, 2, 64 << 30)},
]
for change in OTHER_MACHINES:
    COMPARED[str(change)] = Case(
        [ONE, record(X, **change)], {"x": None}, [OVER_X, NOT_COMPARED], relative=True
    )
COMPARED["other threads"] = Case(
    [ONE, record(X, threads_per_device=2)],
    {"x": None},
    [
        OVER_X,
        "absolute speed is not judged: the sides ran with different numbers of threads for each "
        "device",
    ],
    relative=True,
)
# Changes of the second record's run that leave the machine the same, and notes about them.
SAME_MACHINE: list[tuple[dict[str, Any], list[str]]] = [
    ({"torch": "2.12.0"}, ["torch differs: 2.11.0 / 2.12.0"]),
    ({"devices": 8, "seed": 4}, []),
    ({"machine": Machine("Linux", "a CPU", 2, 2, (8 << 30) + 4096)}, []),
]
for change, notes in SAME_MACHINE:
    COMPARED[str(change)] = Case([ONE, record(X, **change)], {"x": (1.0, "~")}, notes)


@pytest.mark.parametrize("name", COMPARED, ids=COMPARED)
def test_what_is_fair_to_compare(name: str) -> None:
    sides, expected, notes, options, relative = COMPARED[name]

    comparison = only(*sides, **options)

    assert ratios(comparison) == expected
    assert comparison.notes == list(notes)
    assert comparison.relative == relative
    if sides is TWO_MACHINES and relative:
        mean, count = comparison.mean(1) or (0.0, 0)
        assert count == 3, "x is left out: its ratio to itself is 1 anyway"
        assert mean == pytest.approx((2 / 3) ** (1 / 3))


def test_only_rows_that_were_run_alike_differ_in_a_field() -> None:
    ours = row("y", 1.0, config={"row": "y", "link": "p40x8"})
    theirs = row("y", 1.0, config={"row": "y", "link": "h100x8"}, engine="ranks")

    comparison = only(record(X, ours), record(X, theirs), every=True)

    assert comparison.notes == ["missing in B: y", "missing in A: y (ranks)"]


@pytest.mark.parametrize(
    ("rows", "bases"),
    [
        ("xyz", {"x": "z", "y": "z", "z": "z"}),
        ("xy", {"x": "x", "y": "x", "z": "z"}),  # without z, the first row is the baseline
    ],
)
def test_what_rows_are_divided_by(rows: str, bases: dict[str, str]) -> None:
    seconds = {"x": 2.0, "y": 3.0, "z": 4.0}
    made = {name: row(name, seconds[name], over="z") for name in "xyz"}
    old = record(*made.values())
    new = record(*(made[name] for name in rows))

    comparison = only(old, old, new, metric="speedup")

    for compared_row in comparison.rows:
        line = compared_row.line
        base = bases[line.label]
        speed_up = seconds[base] / seconds[line.label]
        found = [reading.middle for reading in compared_row.readings if reading is not None]
        assert found == pytest.approx([speed_up] * len(line.entries))


@pytest.mark.parametrize(
    ("rows", "options", "notes"),
    [
        ([], {}, ["only in A: e (2 rows), f (1 row); --all names them"]),
        ([], {"every": True}, ["only in A: e (x, y), f (x)"]),
        (
            [row("x", values={"loss": 1.0})],
            {},
            [
                "e: no row has the same metric on two sides: A has throughput, time, speedup, "
                "step_time, round; B has loss",
                "only in A: f (1 row); --all names them",
            ],
        ),
        (
            [row("x", 1.0)],
            {"metric": "loss", "every": True},
            ["e: loss is not on two sides of any row", "only in A: f (x)"],
        ),
        (
            [row("x", 1.0, config={"row": "x", "batch_size": 9})],
            {"every": True},
            ["e: A and B differ in batch_size (8 / 9): x", "only in A: f (x)"],
        ),
        (
            [row("z", 1.0, config={"row": "z", "batch_size": 9})],
            {"every": True},
            [
                "e: no row has the same configuration on two sides: A has x, y; B has z",
                "only in A: f (x)",
            ],
        ),
    ],
)
def test_experiments_without_a_table(
    rows: list[Any], options: dict[str, Any], notes: list[str]
) -> None:
    first = record(X, row("y", 1.0), row("x", 1.0, experiment="f"))
    second = record(*rows)
    assert compared(first, second, **options) == ([], notes)
