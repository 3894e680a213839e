"""The league's tables: errors and errors of ratios, against what is worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reproduce.error import Error
from reproduce.records.record import Record, Result, save
from reproduce.tables.league_docs import league_block


def table(root: Path, folder: str, name: str, published: dict[str, float], predicted: dict[str, float]) -> None:
    """Save a publication whose rows are over its first, and predictions of it."""
    where = root / "results" / "league" / folder
    where.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {"partitions": 4, "replicas": 2, "chunks": 8}
    first = next(iter(published))
    for kind, values in (("published", published), ("predicted", predicted)):
        rows = [
            Result(name, row, kind, config=config, over=None if row == first else first, hardware="a100x8",  # type: ignore[arg-type]
                   values={"throughput": value})
            for row, value in values.items()
        ]  # fmt: skip
        made = Record(name, "A table", kind, {}, rows, source={"where": "a page"}, notes=["a note"])  # type: ignore[arg-type]
        save(made, where / f"{name}{'-predicted' if kind == 'predicted' else ''}.json")


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"][2:]


def test_a_publication(tmp_path: Path) -> None:
    table(tmp_path, "", "one", {"a": 100, "b": 200}, {"a": 110, "b": 187})
    text = league_block(tmp_path, "one")
    assert cells(text) == [["a", "8", "8", "100", "110", "+10%", ""], ["b", "8", "8", "200", "187", "-6%", "-15%"]]
    assert "published: a page" in text and "ratio: to a" in text and "a note" in text


def test_the_summary_and_the_first_predictions(tmp_path: Path) -> None:
    table(tmp_path, "", "one", {"a": 100, "b": 200, "c": 100}, {"a": 110, "b": 187, "c": 110})
    table(tmp_path, "first", "two", {"a": 100}, {"a": 150})
    assert cells(league_block(tmp_path, "summary"))[-1] == ["all", "3", "10.0%", "10.0%", "2", "7.5%", "1 of 2"]
    assert cells(league_block(tmp_path, "first"))[-1] == ["all", "1", "50.0%", "50.0%", "0", "", ""]


def test_refuses_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(Error, match="after the slash name one of summary, first"):
        league_block(tmp_path, "three")
