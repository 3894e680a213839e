"""Accuracy runs: every epoch is kept, and whatever ends a run, the next one goes on to the same results."""

from __future__ import annotations

import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from reproduce.cli.main import main
from reproduce.error import Error
from reproduce.experiments import AccuracyScale, Experiment
from reproduce.records.record import Result, load
from reproduce.run.accuracy import run as run_module
from reproduce.run.accuracy.needs import prepare
from reproduce.run.accuracy.run import SERIES
from reproduce.run.accuracy.training import AccuracyTraining
from reproduce.run.session import UNITS
from reproduce.tables.layout import WIDTH

pytest.importorskip("torchvision")
STEPS, EPOCHS, SEEDS = 2, 2, 2  # of tiny.py
GPIPE = "GPipe n8m4"


class Run:
    """Run the tiny experiment in a folder, as often as asked; keep its results and what was said."""

    def __init__(self, runner: Any, folder: Path) -> None:
        self.runs, self.folder = runner(folder), folder

    def __call__(self, seed: int = 0) -> dict[str, Result]:
        experiment: Experiment = runpy.run_path(str(Path(__file__).parents[2] / "tiny.py"))["TINY"]["tiny-accuracy"]
        scale = experiment.scale("small")
        assert isinstance(scale, AccuracyScale)
        found: dict[str, Result] = self.runs(
            experiment, scale, seed, accuracy=prepare(experiment, scale, None, seed, None)
        )
        return found

    @property
    def checkpoints(self) -> list[Path]:
        return sorted((self.folder / "checkpoints").glob("*.pt"))


@pytest.fixture
def run(runner: Any, tmp_path: Path) -> Run:
    return Run(runner, tmp_path)


@pytest.fixture(scope="module")
def uninterrupted(runner: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    return Run(runner, tmp_path_factory.mktemp("run"))()


def learnt(results: Mapping[str, Result]) -> dict[str, Any]:
    """Return all that does not depend on the clock, or on how often the run was stopped."""
    return {
        row: (result.status, {name: values for name, values in result.samples.items() if name != "epoch_time"})
        for row, result in results.items()
    }


def test_every_epoch_of_every_seed_is_in_the_record(uninterrupted: dict[str, Result]) -> None:
    assert list(uninterrupted) == ["plain", GPIPE], "on two devices, for no clock is involved"
    for result in uninterrupted.values():
        assert result.status == "measured" and tuple(result.samples) == SERIES
        assert result.samples["seed"] == [0, 0, 1, 1] and result.samples["epoch"] == [1, 2, 1, 2]
        assert all(0 <= error <= 100 for error in result.samples["top1_error"])
        assert min(result.samples["epoch_time"]) > 0 and result.values == {"samples_per_epoch": 32}
        assert set(result.samples) | set(result.values) <= set(UNITS)
    assert uninterrupted["plain"].samples["train_loss"][0] != uninterrupted["plain"].samples["train_loss"][2]


class Stop(BaseException):
    """Stand for whatever ends a run at once."""


def fail(monkeypatch: pytest.MonkeyPatch, error: BaseException, at: int, where: str = "step", row: str = "") -> None:
    """Let calls from the one numbered `at` on raise: training steps, those of a row if given, or saves, as they end."""
    owner: Any = AccuracyTraining if where == "step" else run_module
    call, calls = getattr(owner, where), iter(range(10**6))

    def failing(*arguments: Any) -> Any:
        fails = row in ("", arguments[0].row.name if where == "step" else "") and next(calls) >= at
        if fails and where == "step":
            raise error
        result = call(*arguments)
        if fails:
            raise error
        return result

    monkeypatch.setattr(owner, where, failing)


@pytest.mark.parametrize(
    ("where", "at", "recorded", "kept"),
    [
        ("step", 3, 1, 1),
        ("save_checkpoint", 0, 1, 1),
        pytest.param("step", 0, 0, 0, marks=pytest.mark.slow),
        pytest.param("step", 2 * STEPS * EPOCHS + 3, 5, 5, marks=pytest.mark.slow),
        pytest.param("step", 4 * STEPS * EPOCHS - 1, 7, 7, marks=pytest.mark.slow),
        pytest.param("write_atomically", 2, 3, 3, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_was_stopped_goes_on_to_the_same_results_to_the_bit(
    where: str, at: int, recorded: int, kept: int, run: Run, uninterrupted: dict[str, Result],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    with monkeypatch.context() as patch, pytest.raises(Stop):
        fail(patch, Stop(), at, where)
        run()
    assert sum(len(result.samples.get("epoch", [])) for result in run.runs.results.values()) == recorded

    torch.rand(3)  # another process has drawn other random numbers
    assert learnt(run()) == learnt(uninterrupted)
    resumed = [epoch for result in run.runs.results.values() for _, epoch in result.values.get("resumed_after", [])]
    assert sum(resumed) == kept and run.runs.said.count("goes on after epoch") == len(resumed)
    assert not run.checkpoints, "what is finished is in nobody's way"


@pytest.mark.slow
def test_another_seed_starts_anew(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "_put_away", lambda *_: None)
        first = learnt(run())
    assert len(run.checkpoints) == 2 * SEEDS
    assert learnt(run(seed=5))["plain"] != first["plain"] and "goes on" not in run.runs.said
    run.checkpoints[0].write_bytes(b"not a checkpoint")
    reason = str(run()[GPIPE].reason)
    assert reason.endswith(" cannot be read as a checkpoint (UnpicklingError); delete it") and "\n" not in reason


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory", "seed 0: out of memory"),
        (ValueError("no"), "failed", "seed 0: ValueError: no (test_run.py, line "),
        (Error("no room"), "failed", "seed 0: no room"),
    ],
)
def test_a_row_that_fails_is_a_result_and_keeps_its_epochs(
    error: Exception, status: str, reason: str, run: Run, uninterrupted: dict[str, Result],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    with monkeypatch.context() as patch:
        fail(patch, error, STEPS, row=GPIPE)
        found = run()
    assert found[GPIPE].status == status and (found[GPIPE].reason or "").startswith(reason)
    assert found[GPIPE].samples["epoch"] == [1] and len(found["plain"].samples["epoch"]) == SEEDS * EPOCHS
    assert learnt(run()) == learnt(uninterrupted), "the next run goes on, now that the cause is gone"


def test_a_training_that_diverges_is_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AccuracyTraining, "step", lambda self, *batch: torch.tensor(float("nan")))
    found = run()
    assert (found["plain"].status, found["plain"].samples["epoch"]) == ("failed", [])
    assert "the loss is nan in epoch 1: the training has diverged" in (found["plain"].reason or "")


@pytest.mark.parametrize(
    ("paper", "arguments", "said"),
    [
        (False, ["--scale", "small", "--data", "x"], "--data x: scale small makes its own data; leave --data out"),
        (False, ["--scale", "paper"], "it needs CUDA devices with 22 GiB of memory each"),
        (False, ["--data", "x"], "--scale paper: it needs CUDA devices"),
        (True, ["--scale", "paper"], "trains on ImageNet: name its folder by --data DIR, which must have train/<cl"),
        (True, ["--data", "/none"], "--data /none: train/ cannot be used (No such file or directory); put ImageNet"),
    ],
)
@pytest.mark.usefixtures("tiny")
def test_what_is_wrong_is_one_line(
    paper: bool, arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if paper:  # as if this machine held it
        monkeypatch.setattr("reproduce.cli.run.choose_scale", lambda *_: "paper")
    assert main(["run", "tiny-accuracy", "--on", "cpu", "--out", str(tmp_path), *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("reproduce: ") and said in err and err.count("\n") == 1
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.usefixtures("tiny")
def test_the_command_goes_on_after_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["run", "tiny-accuracy", "--on", "cpu", "--scale", "small", "--out", ".", "--row", "plain", "--seeds=1"]
    with monkeypatch.context() as patch:
        fail(patch, KeyboardInterrupt(), STEPS)
        assert main(command) == 130
    (first,) = tmp_path.glob("*.json")
    assert load(first).results[0].samples["epoch"] == [1]
    capsys.readouterr()

    assert main(command) == 0
    out, err = capsys.readouterr()
    assert "plain, seed 0: goes on after epoch 1 of 2, which is in\n" in err
    assert max(map(len, out.splitlines())) <= WIDTH and "GPipe" not in out.replace("kakaobrain/torchgpipe", "")
    assert "mean +- standard deviation over 1 seed" in " ".join(out.split())
    (path,) = set(tmp_path.glob("*.json")) - {first}
    record = load(path)
    assert [result.samples["epoch"] for result in record.results] == [[1, 2]]
    assert record.run is not None and record.run.settings["seeds"] == 1
    assert record.run.settings["tiny-accuracy"]["made"]["train_size"] == 32
    assert main(["show", str(path)]) == 0
