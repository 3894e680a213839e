"""Published numbers: the committed records fit together, and others can be imported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reproduce.records.published import PAPER, import_tables, published

NAMES = sorted(path.stem for path in PAPER.glob("*.json"))


def test_every_discrepancy_is_attached_to_the_tables_that_it_concerns() -> None:
    discrepancies = {result.row for result in published("discrepancies").results}
    assert discrepancies == {result.row for name in NAMES for result in published(name).discrepancies}


@pytest.mark.parametrize("name", NAMES)
def test_values_and_units_are_those_of_columns(name: str) -> None:
    record = published(name)
    assert all(set(result.values) == set(record.columns) for result in record.results)
    assert set(record.unit) <= set(record.columns)


FIELDS = ("title", "source", "hardware", "software", "unit", "columns", "notes")


def test_the_files_are_what_an_import_writes(tmp_path: Path) -> None:
    tables = []
    for record in map(published, NAMES):
        rows = [{"experiment": each.row, "config": each.config, "values": each.values} for each in record.results]
        kept = {field: getattr(record, field) for field in FIELDS}
        tables.append({"id": record.name, "rows": rows, **kept})
    (tmp_path / "source").write_text(json.dumps(tables))
    written = import_tables(tmp_path / "source", tmp_path)
    assert [path.stem for path in written] == NAMES
    assert all(path.read_bytes() == (PAPER / path.name).read_bytes() for path in written)
