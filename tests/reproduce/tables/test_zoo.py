"""The table of many models: a line for each without holes, also where rows have no numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec import structs

from reproduce.cli.main import main
from reproduce.experiments import Experiment
from reproduce.records.record import load
from reproduce.report.page import page
from reproduce.tables.all import tables
from reproduce.tables.layout import WIDTH


def test_runs_and_shows_every_row(tiny: Mapping[str, Experiment], tmp_path: Path) -> None:
    assert main(["run", "tiny-zoo", "--on", "cpu", "--devices", "2", "--steps", "2", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    record = load(path)
    assert {(each.status, each.emulated) for each in record.results} == {("measured", False), ("emulated", True)}
    balances = {each.row: each.config["balance"] for each in record.results if each.emulated}
    assert balances["resnet18 n2 equal"] == [33, 32] and balances["resnet18 n8 equal"] == [9, *[8] * 7]
    assert sum(balances["resnet18 n8"]) == 65 and len(balances["resnet18 n8"]) == 8
    (table,) = tables(record)
    headings = ["model", "samples/s\nmeasured", "n=2\nplan", "n=2\nmeasured", "n=2\nequal", "n=8\nplan", "n=8\nequal"]
    assert list(table.headings) == headings
    ((model, *cells),) = table.rows
    assert model == "U-Net" and all(float(cell.replace(",", "")) > 0 for cell in cells)
    assert max(map(len, table.text().splitlines())) <= WIDTH
    assert all(f">{each.row}<" in page([record]) for each in record.results)

    ends = {"resnet18 n2": "out of memory", "resnet18 n8 equal": "failed"}
    ended = [
        structs.replace(each, status=ends[each.row], samples={}, reason=f"of {each.row}") if each.row in ends else each
        for each in record.results
    ]
    (table,) = tables(structs.replace(record, results=ended))
    ends = dict(zip(table.headings, table.rows[0], strict=True))
    assert ends["n=2\nplan"] == "out of memory" and ends["n=8\nequal"] == "failed"
    assert "failed: resnet18 n2: of resnet18 n2" in table.notes
