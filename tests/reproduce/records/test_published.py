"""Published numbers: the committed records fit together, and others can be imported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reproduce.error import Error
from reproduce.records.published import PAPER, import_tables, published
from reproduce.records.record import load

NAMES = sorted(path.stem for path in PAPER.glob("*.json"))


def test_every_discrepancy_is_attached_to_the_tables_that_it_concerns() -> None:
    discrepancies = {result.row for result in published("discrepancies").results}
    assert discrepancies == {result.row for name in NAMES for result in published(name).discrepancies}


@pytest.mark.parametrize("name", NAMES)
def test_values_and_units_are_those_of_columns(name: str) -> None:
    record = published(name)
    assert all(set(result.values) == set(record.columns) for result in record.results)
    assert set(record.unit) <= set(record.columns)


@pytest.mark.parametrize("name", NAMES)
def test_the_file_is_what_an_import_writes(name: str, tmp_path: Path) -> None:
    record = published(name)
    rows = [{"experiment": result.row, "config": result.config, "values": result.values} for result in record.results]
    kept = ("title", "source", "hardware", "software", "unit", "columns", "notes")
    table = {"id": name, "rows": rows, **{field: getattr(record, field) for field in kept}}
    discrepancies = json.loads(json.dumps({**GOOD, "id": "discrepancies", "rows": []}))
    for result in published("discrepancies").results:
        discrepancies["rows"].append({"experiment": result.row, "config": result.config, "values": result.values})
    (tmp_path / "tables.json").write_text(json.dumps([table] if name == "discrepancies" else [table, discrepancies]))
    import_tables(tmp_path / "tables.json", tmp_path)
    assert (tmp_path / f"{name}.json").read_bytes() == (PAPER / f"{name}.json").read_bytes()


GOOD: dict[str, Any] = {
    "id": "t", "title": "T", "source": {}, "hardware": None, "software": None, "unit": {}, "columns": ["x"],
    "rows": [{"experiment": "a", "config": {}, "values": {"x": 1}}], "notes": [],
}  # fmt: skip


def test_import_writes_a_record(tmp_path: Path) -> None:
    (tmp_path / "tables.json").write_text(json.dumps([GOOD]))
    (path,) = import_tables(tmp_path / "tables.json", tmp_path)
    assert [(result.row, result.status, result.values) for result in load(path).results] == [
        ("a", "published", {"x": 1})
    ]


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({}, "Expected `array`, got `object`"),
        ([GOOD, {**GOOD, "id": 3}], "[1].id: Expected `str`, got `int`"),
        ([{**GOOD, "rows": [{"experiment": "a"}]}], "[0].rows[0]: Object missing required field `config`"),
        ([{**GOOD, "remark": ""}], "[0]: Object contains unknown field `remark`"),
    ],
)
def test_broken_tables_are_refused(tables: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "tables.json"
    path.write_text(json.dumps(tables))
    with pytest.raises(Error) as caught:
        import_tables(path, tmp_path)
    assert str(caught.value) == f"{path}: {message}"
