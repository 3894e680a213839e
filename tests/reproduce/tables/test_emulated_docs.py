"""The distance of emulated speed-ups from published ones; and a run's emulated rows beside the same rows predicted."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from reproduce.cli.main import main
from reproduce.experiments import LIKE_PUBLISHED, PUBLISHED_BALANCE, Row
from reproduce.numbers.metrics import throughput
from reproduce.records.published import published
from reproduce.records.record import Record, save
from reproduce.tables.emulated_docs import distance, distances

from ..made import ran
from ..made import record as made

PAPERS = {paper.row: paper for paper in published("tg-unet-speed").results}


def run(**factors: float) -> Record:
    """Make a run of U-Net's rows, as fast as published, times a factor where one is given; `_pb`: in that balance."""

    def speeds(row: Row) -> list[float] | None:
        if row.configuration not in (LIKE_PUBLISHED, PUBLISHED_BALANCE):
            return None
        speed = throughput(PAPERS[row.name.partition("/")[0]])
        assert speed is not None
        return [speed.middle * factors.get(row.name.replace("-", "_").replace("/", "_"), 1.0)] * 3

    return made(
        *[replace(each, config=as_run(each.config)) for each in ran("unet-speed", "small", speeds, emulated=True)]
    )


def as_run(config: dict[str, object]) -> dict[str, object]:
    """Return a row's configuration as it was run, with a balance; of a model that takes little time."""
    paper = PAPERS["baseline" if config["partitions"] is None else f"pipeline-{config['partitions']}"]
    return {**config, "balance": paper.config["balance"], "C": 4, "input_shape": [3, 64, 64]}


@pytest.mark.parametrize(
    ("factors", "errors", "last"),
    [
        ({}, [0.0, 0.0, 0.0, 0.0], ["10 of 10", "0.0%", "+0% (pipeline-1)", "not run"]),
        # now behind pipeline-4; in front of pipeline-2
        ({"pipeline_8": 0.5}, [0.0, 0.0, 0.0, -0.5], ["9 of 10", "0.0%", "-50% (pipeline-8)", "+0%"]),
        ({"baseline": 2.0}, [-0.5, -0.5, -0.5, -0.5], ["9 of 10", "50.0%", "-50% (pipeline-1)", "not run"]),
        (
            {"pipeline_8": 1.5, "pipeline_8_pb": 1.25},
            [0.0, 0.0, 0.0, 0.5],
            ["10 of 10", "0.0%", "+50% (pipeline-8)", "+25%"],
        ),
    ],
)
def test_distance_from_the_published_speed_ups(factors: dict[str, float], errors: list[float], last: list[str]) -> None:
    whole = run(**factors)
    found = distance(whole, "unet-speed")
    assert found is not None and list(found.errors.values()) == pytest.approx(errors)
    (cells,) = distances([whole]).rows
    assert list(cells) == ["unet-speed", "2020-04-21T10:02", *last]


def test_only_whole_emulated_tables_count() -> None:
    whole = run()
    measured = [replace(row, status="measured", emulated=False) for row in whole.results]
    for results in (whole.results[1:], measured):
        assert not distances([replace(whole, results=results)]).rows


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
