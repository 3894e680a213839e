"""Tests of `match`, which finds the results of several records that can be compared.

Results can be compared if they have the same configuration. Their order in the records and their
names do not matter.
"""

from typing import Any

import pytest
from msgspec.structs import replace

from reproduce.numbers.match import Line, match
from reproduce.numbers.sources import side_of
from reproduce.records.record import Record, Result

from ..made import emulated, record, row

CONFIG: dict[str, Any] = {"L": 18, "partitions": 2, "chunks": 4}
N2M4 = "tg-amoebanetd-speed/n2m4"


Shape = list[tuple[str, dict[int, str]]]
"""The label of each line of a table, and a dictionary from a side's number to its row's name."""


def lines(*sides: list[Record]) -> list[Line]:
    loaded = []
    for letter, records in zip("ABCD", sides, strict=False):
        loaded.append(side_of(letter, letter, records))
    return match(loaded)


def shape(found: list[Line]) -> Shape:
    shapes = []
    for line in found:
        rows = {side: entry.result.row for side, entry in line.entries.items()}
        shapes.append((line.label, rows))
    return shapes


def published(row: str, experiment: str = "tg-amoebanetd-speed", **config: Any) -> Record:
    result = Result(experiment, row, "published", config=config)
    return Record("table", "T", "published", {}, [result])


def reproducing(name: str, **changes: Any) -> Record:
    """Make a record with one result, which is measured and reproduces a published result.

    Args:
        name: The name of the measured result.
        changes: Fields of its configuration that differ from the published configuration.
    """
    config = {**CONFIG, **changes}
    return record(row(name, 1.0, experiment="amoebanet-speed", published=N2M4, config=config))


PUBLISHED = published("n2m4", **CONFIG, parameters_exact=1)


# Two configurations, and whether results with these configurations are compared.
ALIKE: list[tuple[dict[str, Any], dict[str, Any], bool]] = [
    ({"L": 6, "m": 4}, {"L": 6, "m": 4}, True),
    ({"L": 6, "m": 4}, {"L": 6, "m": 8}, False),
    # Balances may differ, and older records do not have the field `components`.
    ({"L": 6, "balance": [1, 2]}, {"L": 6, "balance": [2, 1]}, True),
    ({"L": 6}, {"L": 6, "components": []}, True),
    ({"checkpoint": None}, {"checkpoint": "always"}, False),
    ({"L": 6}, {"benchmark": "x"}, False),
    ({"L": 6}, {"L": 6, "changed_from": "x"}, False),  # changed by `--set`: never the original
    ({"L": 6, "changed_from": "x"}, {"L": 6, "changed_from": "x"}, True),
]


def test_among_rows_of_one_configuration_the_likest_is_taken() -> None:
    """Check which result is compared if a record has several results with one configuration.

    The most similar result must be compared. If the results differ only in scale (set of sizes) or
    device, their labels name the scale or the device.
    """
    small, paper = row("x", 1.0, scale="small"), row("x", 1.0, scale="paper", device="meta")

    found = lines([record(small, paper)], [record(paper, small)])

    one, other = found
    assert one.label == "x (small)"
    assert {entry.result.scale for entry in one.entries.values()} == {"small"}
    assert other.label == "x (paper)"
    assert {entry.result.scale for entry in other.entries.values()} == {"paper"}


def predicted(name: str, in_row: bool) -> Record:
    """Make a record with one result, which is predicted for a hardware.

    Args:
        name: The name of the hardware.
        in_row: If true, the result has the name of the hardware. If false, the record has it.
    """
    if in_row:
        result = row("x", status="predicted", hardware=name)
        return Record(f"x-{name}", "T", "predicted", {}, [result])
    result = row("x", status="predicted")
    return Record(f"x-{name}", "T", "predicted", {}, [result], hardware={"name": name})


X, Y, Z = row("x", 1.0), row("y", 1.0), row("z", 1.0)
N2 = row("x", 1.0, published=N2M4, experiment="amoebanet-speed")
MEASURED = record(N2)
EMULATED = record(emulated(N2))
BOTH = record(N2, emulated(N2))
ENGINES = record(X, row("x", 1.0, engine="ranks"))
SHARED = {0: "x", 1: "x"}
WITH_PUBLISHED = {0: "x", 1: "n2m4"}
# Each value has two parts. The first part has a list of records for each side (A, B, …) of the
# comparison. The second part has the expected lines of the comparison's table: the label of the
# line, and a dictionary. The dictionary maps the index of a side to the name of its result.
PLACED: dict[str, tuple[list[list[Record]], Shape]] = {}
for ours, theirs, same in ALIKE:
    sides = [[record(replace(row("one"), config=ours))]]
    sides += [[record(replace(row("other"), config=theirs))]]
    expected: Shape = [("one", {0: "one"}), ("other", {1: "other"})]
    if same:
        expected = [("one", {0: "one", 1: "other"})]
    PLACED[f"{ours} and {theirs}"] = sides, expected
PLACED |= {
    "in any order, and sides may lack rows": (
        [[record(X, Y)], [record(Z, Y, X)], [], [record(Z)]],
        [("x", SHARED), ("y", {0: "y", 1: "y"}), ("z", {1: "z", 3: "z"})],
    ),
    "emulated apart from measured": (
        [[BOTH], [BOTH]],
        [("x", SHARED), ("x (emulated)", SHARED)],
    ),
    "also alone": (
        [[MEASURED], [EMULATED]],
        [("x", {0: "x"}), ("x (emulated)", {1: "x"})],
    ),
    "either reproduces it": (
        [[BOTH], [PUBLISHED]],
        [("x", WITH_PUBLISHED), ("x (emulated)", WITH_PUBLISHED)],
    ),
    "an engine apart from another": (
        [[ENGINES], [ENGINES]],
        [("x", SHARED), ("x (ranks)", SHARED)],
    ),
}
for in_row in (True, False):
    p40, h100 = predicted("p40", in_row), predicted("h100", in_row)
    PLACED[f"predictions for two machines, {in_row}"] = (
        [[p40, h100], [h100]],
        [("x (p40)", {0: "x"}), ("x (h100)", SHARED)],
    )
    PLACED[f"predictions for two machines, the first of which is new, {in_row}"] = (
        [[p40], [h100, p40]],
        [("x (p40)", SHARED), ("x (h100)", {1: "x"})],
    )
PLACED |= {
    "its own configuration": (
        [[PUBLISHED], [reproducing("exact"), reproducing("other", L=6)]],
        [("exact", {1: "exact", 0: "n2m4"}), ("other", {1: "other"})],
    ),
    "all at another scale": (
        [[reproducing("x", L=6), reproducing("y", L=7)], [PUBLISHED]],
        [("x", WITH_PUBLISHED), ("y", {0: "y", 1: "n2m4"})],
    ),
    "no row that was changed": (
        [[reproducing("x", changed_from="y")], [published("x", **CONFIG)]],
        [("x (small)", {0: "x"}), ("x", {1: "x"})],
    ),
    "what each side has of it": (
        [[PUBLISHED], [reproducing("exact")], [reproducing("small", L=6)]],
        [("exact", {1: "exact", 0: "n2m4"}), ("small", {2: "small", 0: "n2m4"})],
    ),
    "without any, alone in its experiment": (
        [[PUBLISHED], [published("n2m4")]],
        [("n2m4", {0: "n2m4", 1: "n2m4"})],
    ),
    "by name, where nothing else tells rows apart": (  # as in the published ablation
        [[published("a"), published("b")], [published("b"), published("a")]],
        [("a", {0: "a", 1: "a"}), ("b", {0: "b", 1: "b"})],
    ),
}


@pytest.mark.parametrize(("sides", "expected"), PLACED.values(), ids=PLACED)
def test_which_rows_are_on_a_line(sides: list[list[Record]], expected: Shape) -> None:
    assert shape(lines(*sides)) == expected
