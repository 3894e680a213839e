"""Match: rows with the same configuration share a line, in whatever order, name or record they come."""

from typing import Any

import pytest
from msgspec.structs import replace

from reproduce.numbers.match import Line, match
from reproduce.numbers.sources import side_of
from reproduce.records.record import Record, Result

from ..made import emulated, record, row

CONFIG: dict[str, Any] = {"L": 18, "partitions": 2, "chunks": 4}
N2M4 = "tg-amoebanetd-speed/n2m4"


def lines(*sides: list[Record]) -> list[Line]:
    return match(
        [side_of(letter, letter, records) for letter, records in zip("ABCD", sides, strict=False)]
    )


def shape(found: list[Line]) -> list[tuple[str, dict[int, str]]]:
    """Return each line's label and, by the side's number, the rows on it."""
    return [
        (line.label, {side: entry.result.row for side, entry in line.entries.items()})
        for line in found
    ]


def published(row: str, experiment: str = "tg-amoebanetd-speed", **config: Any) -> Record:
    return Record(
        "table", "T", "published", {}, [Result(experiment, row, "published", config=config)]
    )


def reproducing(name: str, **changes: Any) -> Record:
    """Make a record of a row that reproduces a published one, with its configuration and the given changes."""
    return record(
        row(name, 1.0, experiment="amoebanet-speed", published=N2M4, config={**CONFIG, **changes})
    )


PUBLISHED = published("n2m4", **CONFIG, parameters_exact=1)


# Two configurations, and whether they are the same row's.
ALIKE: list[tuple[dict[str, Any], dict[str, Any], bool]] = [
    ({"L": 6, "m": 4}, {"L": 6, "m": 4}, True),
    ({"L": 6, "m": 4}, {"L": 6, "m": 8}, False),
    ({"L": 6, "balance": [1, 2]}, {"L": 6, "balance": [2, 1]}, True),  # chosen by the run
    ({"L": 6}, {"L": 6, "components": []}, True),  # an older record lacks a field
    ({"checkpoint": None}, {"checkpoint": "always"}, False),
    ({"L": 6}, {"benchmark": "x"}, False),  # nothing in common, and other names
]


def test_among_rows_of_one_configuration_the_likest_is_taken() -> None:
    """If rows differ only in scale or device, the label names these."""
    both = [row("x", 1.0, scale="small"), row("x", 1.0, scale="paper", device="meta")]
    found = lines([record(*both)], [record(*reversed(both))])
    scales = {line.label: {entry.result.scale for entry in line.entries.values()} for line in found}
    assert scales == {"x (small)": {"small"}, "x (paper)": {"paper"}} and len(found) == 2


def predicted(name: str, in_row: bool) -> Record:
    """Make a prediction whose hardware is named in the row, or in the record for all rows."""
    result = row("x", status="predicted", hardware=name if in_row else None)
    return Record(
        f"x-{name}", "T", "predicted", {}, [result], hardware=None if in_row else {"name": name}
    )


X, Y, Z = (row(name, 1.0) for name in "xyz")
N2 = row("x", 1.0, published=N2M4, experiment="amoebanet-speed")
BOTH = record(N2, emulated(N2))
ENGINES = record(X, row("x", 1.0, engine="ranks"))
# The sides, and the rows on each line. One side may have run a published row, another side a smaller one like it.
PLACED: dict[str, tuple[list[list[Record]], list[tuple[str, dict[int, str]]]]] = {
    **{
        f"{ours} and {theirs}": (
            [
                [record(replace(row("one"), config=ours))],
                [record(replace(row("other"), config=theirs))],
            ],
            [("one", {0: "one", 1: "other"})]
            if same
            else [("one", {0: "one"}), ("other", {1: "other"})],
        )
        for ours, theirs, same in ALIKE
    },
    "in any order, and sides may lack rows": (
        [[record(X, Y)], [record(Z, Y, X)], [], [record(Z)]],
        [("x", {0: "x", 1: "x"}), ("y", {0: "y", 1: "y"}), ("z", {1: "z", 3: "z"})],
    ),
    "emulated apart from measured": (
        [[BOTH], [BOTH]],
        [(x, {0: "x", 1: "x"}) for x in ("x", "x (emulated)")],
    ),
    "also alone": (
        [[record(N2)], [record(emulated(N2))]],
        [("x", {0: "x"}), ("x (emulated)", {1: "x"})],
    ),
    "either reproduces it": (
        [[BOTH], [PUBLISHED]],
        [(x, {0: "x", 1: "n2m4"}) for x in ("x", "x (emulated)")],
    ),
    "an engine apart from another": (
        [[ENGINES], [ENGINES]],
        [(x, {0: "x", 1: "x"}) for x in ("x", "x (ranks)")],
    ),
    **{
        f"predictions for two machines, {in_row}": (
            [[predicted("p40", in_row), predicted("h100", in_row)], [predicted("h100", in_row)]],
            [("x (p40)", {0: "x"}), ("x (h100)", {0: "x", 1: "x"})],
        )
        for in_row in (True, False)
    },
    "its own configuration": (
        [[PUBLISHED], [reproducing("exact"), reproducing("other", L=6)]],
        [("exact", {1: "exact", 0: "n2m4"}), ("other", {1: "other"})],
    ),
    "all at another scale": (
        [[reproducing("x", L=6), reproducing("y", L=7)], [PUBLISHED]],
        [("x", {0: "x", 1: "n2m4"}), ("y", {0: "y", 1: "n2m4"})],
    ),
    "what each side has of it": (
        [[PUBLISHED], [reproducing("exact")], [reproducing("small", L=6)]],
        [("exact", {1: "exact", 0: "n2m4"}), ("small", {2: "small", 0: "n2m4"})],
    ),
    "without any, alone in its experiment": (
        [[PUBLISHED], [published("n2m4")]],
        [("n2m4", {0: "n2m4", 1: "n2m4"})],
    ),
    "by name, where nothing else tells rows apart": (  # as the published ablation's
        [[published("a"), published("b")], [published("b"), published("a")]],
        [("a", {0: "a", 1: "a"}), ("b", {0: "b", 1: "b"})],
    ),
}


@pytest.mark.parametrize(("sides", "expected"), PLACED.values(), ids=PLACED)
def test_which_rows_are_on_a_line(
    sides: list[list[Record]], expected: list[tuple[str, dict[int, str]]]
) -> None:
    assert shape(lines(*sides)) == expected
