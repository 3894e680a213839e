"""A run's emulated rows beside the same rows predicted."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from reproduce.cli.main import main
from reproduce.experiments import LIKE_PUBLISHED, PUBLISHED_BALANCE, Row
from reproduce.numbers.metrics import throughput
from reproduce.records.published import published
from reproduce.records.record import Record, save

from ..made import ran
from ..made import record as made

PAPERS = {paper.row: paper for paper in published("tg-unet-speed").results}


def run() -> Record:
    """Make a run of U-Net's rows, as fast as published."""

    def speeds(row: Row) -> list[float] | None:
        if row.configuration not in (LIKE_PUBLISHED, PUBLISHED_BALANCE):
            return None
        speed = throughput(PAPERS[row.name.partition("/")[0]])
        assert speed is not None
        return [speed.middle] * 3

    return made(
        *[replace(each, config=as_run(each.config)) for each in ran("unet-speed", "small", speeds, emulated=True)]
    )


def as_run(config: dict[str, object]) -> dict[str, object]:
    """Return a row's configuration as it was run, with a balance; of a model that takes little time."""
    paper = PAPERS["baseline" if config["partitions"] is None else f"pipeline-{config['partitions']}"]
    return {**config, "balance": paper.config["balance"], "C": 4, "input_shape": [3, 64, 64]}


@pytest.mark.parametrize(("hardware", "how"), [("p40x8", "description p40x8"), ("here", "times on this machine")])
def test_a_run_is_predicted_row_by_row(
    hardware: str, how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(run(), path := tmp_path / "run.json")
    assert main(["predict", "--run", str(path), "--hardware", hardware]) == 0
    out = capsys.readouterr().out
    assert "unet-speed: emulated and predicted" in out and how in " ".join(out.split())
    lines = {line.split()[0]: line.replace(",", "").split()[1:] for line in out.splitlines() if line}
    for row in PAPERS:
        ours, foreseen, times = map(float, lines[row])
        assert foreseen / ours == pytest.approx(times, rel=0.02)
