"""Match: rows of the same configuration stand on one line, whatever order, name or record they come in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from reproduce.error import Error
from reproduce.numbers.match import Line, match, pick, same_work, value_text
from reproduce.numbers.sources import Side, side_of
from reproduce.records.record import Record, Result

Make = Callable[..., Record]
MakeRow = Callable[..., Result]
PAPER_CONFIG = {"L": 18, "partitions": 2, "chunks": 4, "parameters_exact": 1}
N2M4 = "tg-amoebanetd-speed/n2m4"


def lines(*sides: list[Record]) -> list[Line]:
    return match([side_of(letter, letter, records) for letter, records in zip("ABCD", sides, strict=False)])


def shape(found: list[Line]) -> list[tuple[str, dict[int, str]]]:
    return [(line.label, {side: entry.result.row for side, entry in line.entries.items()}) for line in found]


def published(row: str, experiment: str = "tg-amoebanetd-speed", **config: Any) -> Record:
    return Record("table", "T", "published", {}, [Result(experiment, row, "published", config=config)])


@pytest.mark.parametrize(
    ("ours", "theirs", "matched"),
    [
        ({"L": 6, "m": 4}, {"L": 6, "m": 4}, True),
        ({"L": 6, "m": 4}, {"L": 6, "m": 8}, False),
        ({"L": 6, "balance": [1, 2]}, {"L": 6, "balance": [2, 1]}, True),  # chosen by the run
        ({"L": 6}, {"L": 6, "components": []}, True),  # an older record does not know a field
        ({"checkpoint": None}, {"checkpoint": "always"}, False),
    ],
)
def test_by_configuration(
    ours: dict[str, Any], theirs: dict[str, Any], matched: bool, record: Make, row: MakeRow
) -> None:
    found = lines([record(row("one", 1.0, config=ours))], [record(row("another name", 1.0, config=theirs))])
    assert [len(line.entries) for line in found] == ([2] if matched else [1, 1])


def test_order_does_not_matter_and_rows_may_lack(record: Make, row: MakeRow) -> None:
    found = lines([record(row("x", 1.0), row("y", 1.0))], [record(row("z", 1.0), row("y", 1.0), row("x", 1.0))])
    assert shape(found) == [("x", {0: "x", 1: "x"}), ("y", {0: "y", 1: "y"}), ("z", {1: "z"})]


def test_several_sides(record: Make, row: MakeRow) -> None:
    found = lines([record(row("x", 1.0))], [record(row("y", 1.0))], [record(row("x", 1.0), row("y", 1.0))])
    assert shape(found) == [("x", {0: "x", 2: "x"}), ("y", {1: "y", 2: "y"})]


def test_other_experiments_do_not_match(record: Make, row: MakeRow) -> None:
    found = lines([record(row("x", 1.0))], [record(row("x", 1.0, experiment="f"))])
    assert [(line.experiment, len(line.entries)) for line in found] == [("e", 1), ("f", 1)]


def test_among_rows_of_one_configuration_the_likest_is_taken(record: Make, row: MakeRow) -> None:
    """A label tells apart what only scale and device tell apart."""
    both = [row("x", 1.0, scale="small"), row("x", 1.0, scale="paper", device="meta")]
    found = lines([record(*both)], [record(*reversed(both))])
    assert [(line.label, {entry.result.scale for entry in line.entries.values()}) for line in found] == [
        ("x (small)", {"small"}),
        ("x (paper)", {"paper"}),
    ]


def test_a_published_row_goes_to_its_own_configuration(record: Make, row: MakeRow) -> None:
    exact = row("exact", 1.0, config={"L": 18, "partitions": 2, "chunks": 4}, published=N2M4)
    other = row("other", 1.0, config={"L": 6, "partitions": 2, "chunks": 4}, published=N2M4)
    exact, other = (replace(each, experiment="amoebanet-speed") for each in (exact, other))
    found = lines([published("n2m4", **PAPER_CONFIG)], [record(exact, other)])
    assert shape(found) == [("exact", {1: "exact", 0: "n2m4"}), ("other", {1: "other"})]
    assert same_work(*found[0].entries.values())


def test_a_published_row_goes_to_all_that_reproduce_it_at_another_scale(record: Make, row: MakeRow) -> None:
    found = lines(
        [record(row("x", 1.0, config={"L": 6}, published=N2M4), row("y", 1.0, config={"L": 7}, published=N2M4))],
        [published("n2m4", **PAPER_CONFIG)],
    )
    assert [sorted(line.entries) for line in found] == [[0, 1], [0, 1]]
    assert not any(same_work(*line.entries.values()) for line in found)


def test_a_published_row_goes_to_what_each_side_has_of_it(record: Make, row: MakeRow) -> None:
    """One side may have run it as published, and another with a smaller model."""
    exact = row("exact", 1.0, config={"L": 18, "partitions": 2, "chunks": 4}, published=N2M4)
    found = lines(
        [published("n2m4", **PAPER_CONFIG)],
        [record(exact)],
        [record(row("small", 1.0, config={"L": 6}, published=N2M4))],
    )
    assert shape(found) == [("exact", {1: "exact", 0: "n2m4"}), ("small", {2: "small", 0: "n2m4"})]


def test_a_published_row_without_any_stands_alone_in_its_experiment() -> None:
    found = lines([published("n2m4", **PAPER_CONFIG), published("a", "another table")], [published("n2m4")])
    assert [(line.experiment, sorted(line.entries)) for line in found] == [
        ("amoebanet-speed", [0, 1]),
        ("another table", [0]),
    ]


def test_published_rows_are_told_apart_by_name() -> None:
    """The published ablation's rows, say, may differ in what no field tells."""
    found = lines([published("a"), published("b")], [published("b"), published("a")])
    assert shape(found) == [("a", {0: "a", 1: "a"}), ("b", {0: "b", 1: "b"})]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("n", "2"), ("partitions", "2"), ("m", "4"), ("experiment", "e"), ("row", "x"), ("scale", "small"),
     ("device", "cpu"), ("balance", "[1,2]"), ("parameters_exact", "-")],
)  # fmt: skip
def test_values_of_a_line(name: str, expected: str, record: Make, row: MakeRow) -> None:
    (line,) = lines([record(row("x", 1.0, config={"partitions": 2, "chunks": 4, "balance": [1, 2]}))])
    assert value_text(line, name) == expected


@pytest.mark.parametrize(
    ("filters", "rows"),
    [
        ([], ["n2m1", "n2m4", "n10m1", "n10m4"]),
        (["n=2"], ["n2m1", "n2m4"]),
        (["n=2,10", "m=1"], ["n2m1", "n10m1"]),
        (["n=2", "n=10", "m=4"], ["n2m4", "n10m4"]),
        (["row=n2m4"], ["n2m4"]),
        (["n"], "--filter n: give a field and its values, as in --filter n=2,4"),
        (["=2"], "--filter =2: give a field and its values, as in --filter n=2,4"),
        (["n=3"], "--filter n=3: no row is left; n is 2, 10"),
        (["x=3"], "--filter x=...: no row has x; there are experiment, row, scale, device, model, batch_size, part"),
    ],
)
def test_filters(filters: list[str], rows: list[str] | str, record: Make, row: MakeRow) -> None:
    results = [row(f"n{n}m{m}", 1.0, config={"partitions": n, "chunks": m}) for n in (2, 10) for m in (1, 4)]
    every = lines([record(*results)])
    if isinstance(rows, list):
        assert [line.label for line in pick(every, filters)] == rows
    else:
        with pytest.raises(Error) as caught:
            pick(every, filters)
        assert str(caught.value).startswith(rows)


def test_predictions_for_two_machines_are_two_rows(row: MakeRow) -> None:
    """Whether the row names the hardware description, or its record does for all."""

    def predicted(name: str, in_row: bool) -> Record:
        result = row("x", status="predicted", hardware=name if in_row else None)
        return Record(f"x-{name}", "T", "predicted", {}, [result], hardware=None if in_row else {"name": name})

    for in_row in (True, False):
        both = [predicted("p40", in_row), predicted("h100", in_row)]
        found = lines(both, both[1:])
        assert [(line.label, sorted(line.entries)) for line in found] == [("x (p40)", [0]), ("x (h100)", [0, 1])]


def test_a_side_may_be_empty() -> None:
    assert match([Side("A", "a", [], [])]) == []
