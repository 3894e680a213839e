"""The table of many models: a run of one has a line without holes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from reproduce.cli.main import main
from reproduce.experiments import Experiment
from reproduce.records.record import load
from reproduce.report.page import page
from reproduce.tables.all import tables


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
    ((model, *cells),) = table.rows
    assert list(table.headings) == headings and model == "U-Net" and all(float(cell) > 0 for cell in cells)
    assert all(f">{each.row}<" in page([record]) for each in record.results)
