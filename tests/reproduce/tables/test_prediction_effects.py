"""The blocks on parts of the model: whole tables, whose last column is what is shipped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from reproduce.p40.single_convolutions import FACES, FIGURES
from reproduce.p40.timings import SOURCES
from reproduce.records.record import load
from reproduce.tables.predicted import speed_up_errors
from reproduce.tables.prediction_effects import choices, convolutions, effects, held_out, timings, variants
from torchgpipe.plan.hardware import load_hardware

pytest.importorskip("torchvision", reason="the measured models are torchvision's")
Cells = Callable[[str], dict[str, list[str]]]
PREDICTED = Path(__file__).resolve().parents[3] / "results" / "predicted"


def test_the_last_variant_is_the_description() -> None:
    assert list(variants().values())[-1] == load_hardware("p40x8")


def test_effects_end_with_the_errors_of_the_records(cells: Cells) -> None:
    table = cells(effects())
    for name in ("amoebanet", "unet", "resnet101"):
        for row, error in speed_up_errors(load(PREDICTED / f"{name}-speed-p40x8.json")).items():
            assert abs(float(table[f"{name} {row}"][-1].rstrip("%")) / 100 - error) < 0.002


def test_choices_begin_with_the_description_and_no_source_decides_on_the_target(cells: Cells) -> None:
    table = cells(choices())
    shares = load_hardware("p40x8")
    kinds = ("conv", "winograd", "winograd_fused")
    assert next(iter(table.values()))[:3] == [f"{shares.compute_efficiency[kind]:.2f}" for kind in kinds]
    assert [row for row in table if row.startswith("without")] == [f"without {name}" for name in SOURCES]
    errors = {row: float(line[5].rstrip("%")) for row, line in table.items()}
    within = {row: int(line[6].removesuffix(" of 16")) for row, line in table.items()}
    assert all(error <= 3 for row, error in errors.items() if row.startswith(("as", "without")))
    assert all(rows >= 0.9 * 16 for row, rows in within.items() if row.startswith(("as", "without")))
    assert errors["with all that is unsteady, too"] > 3, "as docs/prediction.md says"
    apart = [row for row in table if row.startswith("fused") and not row.endswith(("0.50", "of the others"))]
    assert len(apart) == 3
    assert all(errors[row] <= 3 and within[row] >= 0.9 * 16 for row in apart)
    assert within["fused ones at the efficiency of the others"] < 0.9 * 16, "as docs/prediction.md says"


@pytest.mark.parametrize("part", [1, 2], ids=["memory's share", "fused kernels apart"])
def test_of_sources_that_were_held_out_more_gain_than_lose_by(part: int, cells: Cells) -> None:
    table = {name: [float(cell.rstrip("%")) for cell in row] for name, row in cells(held_out()).items()}
    assert list(table) == list(SOURCES)
    gained = [row[part - 1] - row[part] for row in table.values()]
    assert sum(x > 0 for x in gained) > len(gained) / 2
    assert sum(gained) > 0


def test_timings_have_every_model_and_their_mean() -> None:
    lines = timings().splitlines()[2:]
    assert len(lines) == sum(len(source.steps) for source in SOURCES.values()) + 1
    assert lines[-1].startswith("| root mean square")


def test_convolutions_have_every_figure_and_those_of_64_channels_come_out_better() -> None:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in convolutions().splitlines()[2:]]
    assert len(lines) == len(FIGURES)
    for figure, (card, *_, filters, forward, alike, apart, total, alike_in_all, apart_in_all) in zip(
        FIGURES, lines, strict=True
    ):
        assert (card, int(filters)) == (figure.card.name, figure.shape.filters)
        assert [int(forward), int(total)] == pytest.approx([1e6 * figure.seconds, 1e6 * figure.total], abs=1)
        if figure.shape == FACES:
            for before, after in ((alike, apart), (alike_in_all, apart_in_all)):
                assert abs(int(after.rstrip("%"))) < abs(int(before.rstrip("%")))
