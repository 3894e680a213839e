"""Tests of the tables of records that are no runs of experiments.

These records are published results, the published numbers of the league (tables of other projects),
and results of benchmarks. Their tables must have a line for each result, and fit into a terminal.
"""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from reproduce.records.places import RESULTS
from reproduce.records.record import Result, load, save
from reproduce.tables.all import tables
from reproduce.tables.layout import WIDTH, number

from ..made import one_line, record, row

FOLDERS = ("paper", "league", "benchmarks")
PATHS = [path for folder in FOLDERS for path in sorted((RESULTS / folder).glob("*.json"))]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_every_committed_record_has_tables_with_all_rows(path: Path) -> None:
    found = load(path)
    made = tables(found)
    assert made
    for table in made:
        text = table.text()
        assert max(map(len, text.splitlines())) <= WIDTH
        assert len(table.rows) == len(found.results)
        assert len(table.headings) > 1, "there is more than the names of the rows"


def shown(name: str, command: Any) -> str:
    out, _ = command("show", str(RESULTS / f"{name}.json"))
    return out


def test_published_numbers_have_all_their_digits(command: Any) -> None:
    out = shown("paper/tg-amoebanetd-speed", command)
    assert "n2m1   2   1     96      26.733" in out
    said = one_line(out)
    assert "source: torchgpipe, arXiv:2004.09910" in said
    assert "hardware: gpu NVIDIA Tesla P40, num_gpus 8" in said
    assert "- throughput: samples/s" in said
    assert "n=2,m=4, amoebanetd-speed n=2,m=32" in said, "one note for one disagreement"


def test_benchmarks_have_quartiles_units_and_versions(command: Any) -> None:
    found = load(RESULTS / "benchmarks/machinery.json")
    low, high, _ = found.results[0].values["spread"]["forward"]
    out = shown("benchmarks/machinery", command)
    assert f"({number(low)}-{number(high)})" in out
    assert "- forward, backward, both: us/task" in out
    assert "- in brackets: quartiles" in out
    assert "- other: torchgpipe 0.0.7" in out


def test_rows_without_a_number_have_a_status_and_a_reason(tmp_path: Path, command: Any) -> None:
    results = [
        Result("a list", "good", "measured", config={"chunks": 2}),
        Result("a list", "bad", "failed", reason="it cannot be traced"),
        Result("b list", "long", "measured", values={"allocated": [2**30, 2**31]}),
        row("timed", [2.0, 1.0, 4.0], experiment="b list"),
    ]
    made = replace(record(*results), unit={"allocated": "bytes, of each device"})
    save(made, tmp_path / "a.json")

    out, _ = command("show", str(tmp_path / "a.json"))

    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "a list good measured" in lines
    assert "a list bad failed it cannot be traced" in lines
    assert "b list long 1.0 2.0" in lines
    assert any(line.startswith("b list timed 2.00") for line in lines)


def test_a_record_without_rows_says_so(tmp_path: Path, command: Any) -> None:
    save(record(), tmp_path / "a.json")
    out, _ = command("show", str(tmp_path / "a.json"))
    assert "no row of it has ended yet" in out
