"""The blocks on parts of the model: whole tables, whose last column is what is shipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from reproduce.predicted_table import speed_up_errors
from reproduce.prediction_effects import choices, effects, held_out, resources, slower_layers, timings, variants
from reproduce.record import load
from reproduce.timings import SOURCES
from torchgpipe.plan.hardware import load_hardware

pytest.importorskip("torchvision", reason="the measured models are torchvision's")
PREDICTED = Path(__file__).resolve().parents[2] / "results" / "predicted"


def cells(block: str) -> dict[str, list[str]]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
    assert len({len(row) for row in rows}) == 1
    return {row[0]: row[1:] for row in rows[2:]}


def test_the_last_variant_is_the_description() -> None:
    assert list(variants().values())[-1] == load_hardware("p40x8")


def test_effects_end_with_the_errors_of_the_records() -> None:
    table = cells(effects())
    for name in ("amoebanet", "unet", "resnet101"):
        for row, error in speed_up_errors(load(PREDICTED / f"{name}-speed-p40x8.json")).items():
            assert abs(float(table[f"{name} {row}"][-1].rstrip("%")) / 100 - error) < 0.002


def test_choices_begin_with_the_description_and_no_source_decides_on_the_target() -> None:
    table = cells(choices())
    shares = load_hardware("p40x8")
    assert next(iter(table.values()))[:2] == [f"{shares.compute_efficiency[kind]:.2f}" for kind in ("conv", "winograd")]
    assert [row for row in table if row.startswith("without")] == [f"without {name}" for name in SOURCES]
    errors = {row: float(cells[3].rstrip("%")) for row, cells in table.items()}
    assert all(error <= 3 for row, error in errors.items() if row.startswith(("as", "without")))
    assert errors["with all that is unsteady, too"] > 3, "as docs/prediction.md says"


def test_of_sources_that_were_held_out_more_gain_by_memorys_share_than_lose() -> None:
    table = {name: [float(cell.rstrip("%")) for cell in row] for name, row in cells(held_out()).items()}
    assert list(table) == list(SOURCES)
    gained = [without - with_it for without, with_it in table.values()]
    assert sum(x > 0 for x in gained) > len(gained) / 2
    assert sum(gained) > 0


def test_timings_have_every_model_and_their_mean() -> None:
    lines = timings().splitlines()[2:]
    assert len(lines) == sum(len(source.steps) for source in SOURCES.values()) + 1
    assert lines[-1].startswith("| root mean square")


def test_resources_leave_out_what_has_one_device() -> None:
    table = cells(resources())
    assert len(table) == 15
    assert not any(row.endswith(("baseline", "pipeline-1")) for row in table)
    shares = [[int(cell.rstrip("%")) for cell in row] for row in table.values()]
    assert all(0 <= share <= 100 for row in shares for share in row)


def test_slower_layers_matter_most_where_they_are_a_partition() -> None:
    """A row's first column is its error in the records, and the baseline's own slowness is in all of them."""
    table = {row: [float(cell.rstrip("%")) for cell in line] for row, line in cells(slower_layers()).items()}
    errors = speed_up_errors(load(PREDICTED / "unet-speed-p40x8.json"))
    assert list(table) == list(errors)
    assert [line[0] for line in table.values()] == pytest.approx([100 * error for error in errors.values()], abs=0.2)
    assert table["pipeline-1"][-1] == pytest.approx(table["pipeline-1"][0], abs=0.1), "the baseline is slower alike"
    fallen = {row: line[0] - line[-1] for row, line in table.items()}
    assert fallen["pipeline-8"] > 4 * max(fallen["pipeline-2"], fallen["pipeline-4"])
