"""The distance of emulated speed-ups from published ones; and a run's emulated rows beside the same rows predicted."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from reproduce.cli.main import main
from reproduce.experiments import EXPERIMENTS, LIKE_PUBLISHED, PUBLISHED_BALANCE
from reproduce.numbers.metrics import throughput
from reproduce.records.published import published
from reproduce.records.record import Record, Result, save
from reproduce.tables.emulated_docs import distance, distances

from ..made import record as made

PAPERS = {paper.row: paper for paper in published("tg-unet-speed").results}


def run(**factors: float) -> Record:
    """Make a run of U-Net's rows, as fast as published, times a factor where one is given; `_pb`: in that balance."""
    results = []
    for row in EXPERIMENTS["unet-speed"].scale("small").rows:
        if row.configuration in (LIKE_PUBLISHED, PUBLISHED_BALANCE):
            speed = throughput(PAPERS[row.name.partition("/")[0]])
            assert speed is not None
            factor = factors.get(row.name.replace("-", "_").replace("/", "_"), 1.0)
            config = as_run(row.config())
            results.append(Result(
                "unet-speed", row.name, "emulated", "small", "cpu", config, emulated=True,
                samples={"step_time": [row.batch_size / (speed.middle * factor)] * 3, "round": [0, 1, 2]},
            ))  # fmt: skip
    return made(*results)


def as_run(config: dict[str, object]) -> dict[str, object]:
    """Return a row's configuration as it was run, with a balance; of a model that takes little time."""
    paper = PAPERS["baseline" if config["partitions"] is None else f"pipeline-{config['partitions']}"]
    return {**config, "balance": paper.config["balance"], "C": 4, "input_shape": [3, 64, 64]}


@pytest.mark.parametrize(
    ("factors", "errors", "order"),
    [
        ({}, [0.0, 0.0, 0.0, 0.0], 10),
        ({"pipeline_8": 0.5}, [0.0, 0.0, 0.0, -0.5], 9),  # now behind pipeline-4
        ({"baseline": 2.0}, [-0.5, -0.5, -0.5, -0.5], 9),  # now in front of pipeline-2
    ],
)
def test_distance_from_the_published_speed_ups(factors: dict[str, float], errors: list[float], order: int) -> None:
    found = distance(run(**factors), "unet-speed")
    assert found is not None and found.pairs == 10
    assert list(found.errors.values()) == pytest.approx(errors)
    assert found.order == order


def test_what_is_out_by_most_stands_beside_the_same_row_in_the_published_balance() -> None:
    whole = run(pipeline_8=1.5, pipeline_8_pb=1.25)
    found = distance(whole, "unet-speed")
    assert found is not None and list(found.in_published_balance.values()) == pytest.approx([0, 0, 0.25])
    assert distances([whole]).rows[0][-2:] == ("+50% (pipeline-8)", "+25%")
    without = [row for row in whole.results if not row.row.endswith("/pb")]
    assert distances([replace(whole, results=without)]).rows[0][-2:] == ("+50% (pipeline-8)", "not run")


def test_only_whole_emulated_tables_count() -> None:
    whole = run()
    assert [row[0] for row in distances([whole]).rows] == ["unet-speed"]
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
    assert "unet-speed: emulated and predicted" in out and all(f"\n{row} " in out for row in PAPERS)
    assert how in " ".join(out.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name either experiments, or a run by --run"),
        (["unet-speed", "--run", "run.json"], "name either experiments, or a run by --run"),
        (["--run", "run.json"], "--run run.json: it has no emulated rows"),
        (["--run", "run.json", "--out", "."], "--out is for published tables"),
        (["unet-speed"], "predict --run RUN --hardware here those of a run"),
    ],
)
def test_what_cannot_be_predicted_is_said(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save(made(), tmp_path / "run.json")
    assert main(["predict", *arguments, "--hardware", "here"]) == 2
    assert said in capsys.readouterr().err
