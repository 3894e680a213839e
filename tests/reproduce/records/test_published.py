"""Published numbers: the records are what the source has, whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reproduce.error import Error
from reproduce.records.decode import DecodeError
from reproduce.records.published import PAPER, convert, import_tables, published
from reproduce.records.record import load

SOURCE = Path(__file__).resolve().parents[3] / "shared" / "paper" / "tables.json"
NAMES = sorted(path.stem for path in PAPER.glob("*.json"))


@pytest.fixture(scope="module")
def tables() -> dict[str, Any]:
    if not SOURCE.is_file():
        pytest.skip("../shared/paper/tables.json, which the records were made from, is not beside this checkout")
    return {table["id"]: table for table in json.loads(SOURCE.read_text())}


def test_there_is_a_record_for_every_table(tables: dict[str, Any]) -> None:
    assert sorted(tables) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_record_equals_source(tables: dict[str, Any], name: str) -> None:
    record, table = published(name), tables[name]
    rows = [{"experiment": result.row, "config": result.config, "values": result.values} for result in record.results]
    assert rows == table["rows"]
    for field in ("title", "source", "hardware", "software", "unit", "columns", "notes"):
        assert getattr(record, field) == table[field], field


def test_files_are_what_the_import_writes(tables: dict[str, Any], tmp_path: Path) -> None:
    written = import_tables(SOURCE, tmp_path)
    assert {path.name: path.read_text() for path in written} == {
        path.name: path.read_text() for path in PAPER.glob("*.json")
    }


def test_every_disagreement_stands_in_a_table_that_it_concerns() -> None:
    disagreements = {result.row for result in published("discrepancies").results}
    attached = {result.row for name in NAMES for result in published(name).discrepancies}
    assert attached == disagreements


@pytest.mark.parametrize("name", NAMES)
def test_units_are_those_of_columns(name: str) -> None:
    record = published(name)
    assert all(set(result.values) == set(record.columns) for result in record.results)
    assert set(record.unit) <= set(record.columns)


GOOD: dict[str, Any] = {
    "id": "t", "title": "T", "source": {}, "hardware": None, "software": None, "unit": {}, "columns": ["x"],
    "rows": [{"experiment": "a", "config": {}, "values": {"x": 1}}], "notes": [],
}  # fmt: skip


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({}, "the whole file: expected a list, got {}"),
        ([1], "[0]: expected an object, got 1"),
        ([{**GOOD, "id": 3}], "[0].id: expected a string, got 3"),
        ([{**GOOD, "rows": [{"experiment": "a"}]}], "[0].rows[0].config: missing"),
        ([{key: value for key, value in GOOD.items() if key != "unit"}], "[0].unit: missing"),
    ],
)
def test_broken_tables_are_refused(tables: Any, message: str) -> None:
    with pytest.raises(DecodeError) as caught:
        convert(tables)
    assert str(caught.value) == message


def test_import_names_the_file(tmp_path: Path) -> None:
    source = tmp_path / "tables.json"
    source.write_text(json.dumps([{**GOOD, "notes": "none"}]))
    with pytest.raises(Error, match=r"tables.json: \[0\].notes: expected a list, got 'none'"):
        import_tables(source, tmp_path)


def test_import_writes_a_record(tmp_path: Path) -> None:
    source = tmp_path / "tables.json"
    source.write_text(json.dumps([GOOD]))
    (path,) = import_tables(source, tmp_path)
    assert [(result.row, result.status, result.values) for result in load(path).results] == [
        ("a", "published", {"x": 1})
    ]
