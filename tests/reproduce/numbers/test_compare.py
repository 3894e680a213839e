"""Compare: absolute numbers if that is fair, else ratios; missing rows are named."""

from typing import Any

import pytest

from reproduce.machine.description import Machine
from reproduce.numbers.compare import Comparison, compare, verdict
from reproduce.numbers.match import match
from reproduce.numbers.metrics import DISTURBED
from reproduce.numbers.notes import IN_TURN
from reproduce.numbers.significance import Decision, Rule
from reproduce.numbers.sources import side_of
from reproduce.records.record import Record

from ..made import emulated, record, row


def compared(*sides: Record, **options: Any) -> tuple[list[Comparison], list[str]]:
    loaded = [
        side_of(letter, letter, [record]) for letter, record in zip("ABCD", sides, strict=False)
    ]
    return compare(loaded, match(loaded), **{"metric": None, "rule": Rule(), **options})


def only(*sides: Record, **options: Any) -> Comparison:
    (comparison,), notes = compared(*sides, **options)
    assert not notes
    return comparison


def ratios(comparison: Comparison, side: int = 1) -> dict[str, Any]:
    """Return each row's ratio and verdict."""
    decisions, metric = (
        {row.line.label: row.decisions[side] for row in comparison.rows},
        comparison.metric,
    )
    return {
        label: each and (round(each.ratio, 3), verdict(each, metric))
        for label, each in decisions.items()
    }


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
    """Make a side in which y is four times as fast as x when measured, and twice as fast when emulated."""
    rows = [row("x", x, over="x"), row("y", x / 4, over="x")]
    return record(
        *rows, emulated(row("x", 2.0, over="x")), emulated(row("y", 1.0, over="x")), **more
    )


def drifting(*factors: float) -> list[Record]:
    """Make sides in which y is faster than x by these factors, while whole rounds slow down."""
    drift = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    return [
        record(row("x", drift, over="x"), row("y", [each / factor for each in drift], over="x"))
        for factor in factors
    ]


def holding(unit: str, **values: object) -> Record:
    return Record("r", "T", "measured", {"size": unit}, [row("x", values=values)])


# The second machine is twice as fast, but there `y` is only 2 times as fast as `x`, not 3 times.
TWO_MACHINES = [
    record(row("x", 3.0, over="x"), row("y", 1.0, over="x")),
    record(row("x", 1.5, over="x"), row("y", 0.75, over="x"), cpu="another CPU"),
]
LACKING = row("z", status="needs devices", reason="needs 8 devices")
PEAKS = [
    record(row("x", values={"peak_allocated": peak}), cpu=cpu)
    for cpu, peak in (("a", [1, 3]), ("b", [4, 4]))
]
UNKNOWN = "how busy others kept the machine is not known"
LATER = f"the sides ran at different times: a verdict says that these runs differ, not why{{}}; {IN_TURN}"
OVER_X = "each side's throughput is divided by its own x"
OTHER = [OVER_X, "absolute numbers are not compared: the sides ran on different machines"]
# What differs in the second side's run, whether it counts as another machine, and the notes.
MACHINES: list[tuple[dict[str, Any], bool, Any, list[str]]] = [
    ({"cpu": "another CPU"}, True, None, OTHER),
    ({"device": "cuda"}, True, None, OTHER),
    ({"threads_per_device": 2}, True, None, OTHER),
    ({"machine": Machine("Linux", "a CPU", 2, 2, 64 << 30)}, True, None, OTHER),
    ({"torch": "2.12.0"}, False, (1.0, "~"), ["torch differs: 2.11.0 / 2.12.0"]),
    ({"devices": 8, "seed": 4}, False, (1.0, "~"), []),
    ({"machine": Machine("Linux", "a CPU", 2, 2, (8 << 30) + 4096)}, False, (1.0, "~"), []),
]
# The sides, the options, ratio and verdict of each row, whether ratios are compared, the notes.
COMPARED: dict[str, tuple[list[Record], dict[str, Any], dict[str, Any], bool, list[str]]] = {
    "less time is better": (
        [record(row("x", 1.0)), record(row("x", 0.5))],
        {"metric": "time"},
        {"x": (0.5, "better")},
        False,
        [],
    ),
    "as more throughput is": (
        [record(row("x", 1.0)), record(row("x", 1.25))],
        {},
        {"x": (0.8, "worse")},
        False,
        [],
    ),
    "absolute times of different machines": (
        TWO_MACHINES,
        {},
        {"x": None, "y": (0.667, "worse")},
        True,
        OTHER,
    ),
    "by force": (
        TWO_MACHINES,
        {"force": True},
        {"x": (2.0, "better"), "y": (1.333, "better")},
        False,
        ["FORCED: absolute numbers are compared although the sides ran on different machines"],
    ),
    "emulated rows over emulated ones": (
        [emulated_too(4.0), emulated_too(8.0, cpu="another CPU")],
        {},
        {"x": None, "y": (1, "~"), "x (emulated)": None, "y (emulated)": (1, "~")},
        True,
        [f"{OVER_X}, x (emulated)", OTHER[1]],
    ),
    "ratios in rounds": (
        drifting(2, 1.5),
        {"metric": "speedup"},
        {"x": None, "y": (0.75, "worse")},
        True,
        [OVER_X],
    ),
    "which absolute numbers cannot show": (
        drifting(2, 1.5),
        {},
        {"x": (1, "~"), "y": (0.75, "~")},
        False,
        [],
    ),
    "at different times": (
        [record(row("x", 1.0)), record(row("x", 1.0, others=[0.0]), started="2021")],
        {},
        {"x": (1.0, "~")},
        False,
        [LATER.format(f"; {UNKNOWN} of A")],
    ),
    "disturbed": (
        [record(row("x", 1.0, others=[0.0])), record(row("x", 2.0, others=[0.2]), started="2021")],
        {},
        {"x": (0.5, "disturbed")},
        False,
        [LATER.format(""), DISTURBED],
    ),
    "memory, which no machine changes": (PEAKS, {}, {"x": (2.0, "untested")}, False, []),
    "another unit": (
        [holding("GB", size=1.0), holding("GiB", size=1.0)],
        {"metric": "size"},
        {"x": None},
        False,
        [],
    ),
    "zero": (
        [holding("GB", size=0.0), holding("GB", size=1.0)],
        {"metric": "size"},
        {"x": None},
        False,
        [],
    ),
    "what is missing": (
        [
            record(row("x", 1.0), row("y", 1.0), LACKING),
            record(row("x", 1.0), row("w", 1.0), LACKING, row("y", status="out of memory")),
        ],
        {},
        {"x": (1.0, "~")},
        False,
        [
            f"{what}: 1 row; --all names them"
            for what in (
                "no number (out of memory) in B",
                "no number (needs 8 devices) in A and B",
                "missing in A",
            )
        ],
    ),
    **{
        str(change): (
            [record(row("x", 1.0)), record(row("x", 1.0), **change)],
            {},
            {"x": expected},
            relative,
            notes,
        )
        for change, relative, expected, notes in MACHINES
    },
}


@pytest.mark.parametrize(
    ("sides", "options", "expected", "relative", "notes"), COMPARED.values(), ids=COMPARED
)
def test_what_is_fair_to_compare(
    sides: list[Record],
    options: dict[str, Any],
    expected: dict[str, Any],
    relative: bool,
    notes: list[str],
) -> None:
    comparison = only(*sides, **options)
    assert (
        ratios(comparison) == expected
        and comparison.notes == notes
        and comparison.relative == relative
    )
    if sides is TWO_MACHINES and relative:
        assert comparison.mean(1) == pytest.approx((2 / 3, 1)), (
            "the row divided by is left out: it is 1 anyway"
        )


@pytest.mark.parametrize(
    ("rows", "bases"),
    [
        ("xyz", {"x": "z", "y": "z", "z": "z"}),  # all name z
        ("xy", {"x": "x", "y": "x", "z": "z"}),
    ],  # the third side lacks z, so the first row that all have
)
def test_what_rows_are_divided_by(rows: str, bases: dict[str, str]) -> None:
    seconds = {"x": 2.0, "y": 3.0, "z": 4.0}
    old, new = ([row(name, seconds[name], over="z") for name in names] for names in ("xyz", rows))
    for each in only(record(*old), record(*old), record(*new), metric="speedup").rows:
        label = each.line.label
        readings = [reading.middle for reading in each.readings if reading is not None]
        assert readings == pytest.approx(
            [seconds[bases[label]] / seconds[label]] * len(each.line.entries)
        )


@pytest.mark.parametrize(
    ("rows", "options", "notes"),
    [
        ([], {}, ["only in A: e (2 rows), f (1 row); --all names them"]),
        ([], {"every": True}, ["only in A: e (x, y), f (x)"]),
        (
            [row("x", values={"loss": 1.0})],
            {},
            [
                "e: no row has the same metric on two sides: A has throughput, time, speedup, step_time, round; B has loss",
                "only in A: f (1 row); --all names them",
            ],
        ),
        (
            [row("x", 1.0)],
            {"metric": "loss", "every": True},
            ["e: loss is not on two sides of any row", "only in A: f (x)"],
        ),
    ],
)
def test_experiments_without_a_table(
    rows: list[Any], options: dict[str, Any], notes: list[str]
) -> None:
    first = record(row("x", 1.0), row("y", 1.0), row("x", 1.0, experiment="f"))
    assert compared(first, record(*rows), **options) == ([], notes)
