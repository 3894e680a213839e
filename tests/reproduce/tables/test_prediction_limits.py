"""The blocks on what limits the rows: shares of a step, and how much some slower layers would cost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from reproduce.records.record import load
from reproduce.tables.predicted import speed_up_errors
from reproduce.tables.prediction_limits import resources, slower_layers

Cells = Callable[[str], dict[str, list[str]]]
PREDICTED = Path(__file__).resolve().parents[3] / "results" / "predicted"


def test_resources_leave_out_what_has_one_device(cells: Cells) -> None:
    table = cells(resources())
    assert len(table) == 15
    assert not any(row.endswith(("baseline", "pipeline-1")) for row in table)
    shares = [[int(cell.rstrip("%")) for cell in row] for row in table.values()]
    assert all(0 <= share <= 100 for row in shares for share in row)


def test_slower_layers_matter_most_where_they_are_a_partition(cells: Cells) -> None:
    """A row's first column is its error in the records, and the baseline's own slowness is in all of them."""
    table = {row: [float(cell.rstrip("%")) for cell in line] for row, line in cells(slower_layers()).items()}
    errors = speed_up_errors(load(PREDICTED / "unet-speed-p40x8.json"))
    assert list(table) == list(errors)
    assert [line[0] for line in table.values()] == pytest.approx([100 * error for error in errors.values()], abs=0.2)
    assert table["pipeline-1"][-1] == pytest.approx(table["pipeline-1"][0], abs=0.1), "the baseline is slower alike"
    fallen = {row: line[0] - line[-1] for row, line in table.items()}
    assert fallen["pipeline-8"] > 3 * max(fallen["pipeline-2"], fallen["pipeline-4"])
