"""Accuracy runs: every epoch is kept, and whatever ends a run, the next one goes on to the same results."""

from __future__ import annotations

import runpy
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from reproduce.cli.main import main
from reproduce.error import Error
from reproduce.experiments import AccuracyScale, Experiment
from reproduce.records.record import Result, load
from reproduce.run.accuracy.checkpoints import Checkpoints
from reproduce.run.accuracy.needs import AccuracyNeeds, prepare_data
from reproduce.run.accuracy.run import SERIES
from reproduce.run.accuracy.training import AccuracyTraining
from reproduce.run.session import UNITS
from reproduce.tables.layout import WIDTH

pytest.importorskip("torchvision")
TINY = str(Path(__file__).parents[2] / "tiny.py")
ARGUMENTS = ("run", "tiny-accuracy", "--on", "cpu", "--scale", "small")
STEPS, EPOCHS, SEEDS = 2, 2, 2  # of tiny.py
TRAININGS = 2 * SEEDS
PATIENCE = 300  # seconds; only a hang takes as long


class Run:
    """Run the tiny experiment in a folder, as often as asked; keep its results and what was said."""

    def __init__(self, runner: Any, folder: Path) -> None:
        self.runs, self.folder = runner(folder), folder
        self.experiment: Experiment = runpy.run_path(TINY)["TINY"]["tiny-accuracy"]

    def __call__(self, *, fresh: bool = False, seed: int = 0) -> dict[str, Result]:
        scale = self.experiment.scale("small")
        assert isinstance(scale, AccuracyScale)
        checkpoints = Checkpoints(self.folder / "checkpoints", fresh=fresh)
        data = prepare_data(self.experiment, scale, None, seed)
        needs = AccuracyNeeds(data, range(seed, seed + scale.seeds), checkpoints)
        try:
            found: dict[str, Result] = self.runs(self.experiment, scale, seed, accuracy=needs)
            return found
        finally:
            checkpoints.close()

    @property
    def results(self) -> dict[str, Result]:
        found: dict[str, Result] = self.runs.results
        return found

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "checkpoints").glob("*.pt"))


@pytest.fixture
def run(runner: Any, tmp_path: Path) -> Run:
    return Run(runner, tmp_path)


@pytest.fixture(scope="module")
def uninterrupted(runner: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    return Run(runner, tmp_path_factory.mktemp("run"))()


def learnt(results: Mapping[str, Result]) -> dict[str, Any]:
    """Return all that does not depend on the clock, or on how often the run was stopped."""
    return {
        row: (
            result.status,
            {name: values for name, values in result.samples.items() if name != "epoch_time"},
            result.values.get("running_statistics_difference"),
        )
        for row, result in results.items()
    }


def test_every_epoch_of_every_seed_is_in_the_record(uninterrupted: dict[str, Result]) -> None:
    assert list(uninterrupted) == ["plain", "GPipe n8m4"], "on two devices, for no clock is involved"
    for result in uninterrupted.values():
        assert result.status == "measured" and tuple(result.samples) == SERIES
        assert result.samples["seed"] == [0, 0, 1, 1] and result.samples["epoch"] == [1, 2, 1, 2]
        assert all(0 <= error <= 100 for error in result.samples["top1_error"])
        assert min(result.samples["epoch_time"]) > 0 and result.values["samples_per_epoch"] == 32
        assert set(result.samples) | set(result.values) <= set(UNITS)
    assert uninterrupted["plain"].samples["train_loss"][0] != uninterrupted["plain"].samples["train_loss"][2]
    differences = uninterrupted["GPipe n8m4"].values["running_statistics_difference"]
    assert len(differences) == SEEDS and 0 < max(differences) < 1e-4
    assert "running_statistics_difference" not in uninterrupted["plain"].values


class Stop(BaseException):
    """Stand for whatever ends a run at once."""


def fail(error: BaseException, at: int, row: str | None = None) -> Callable[..., Any]:
    """Return a step of training that raises from the one numbered `at` on; only those of `row` count, if given."""
    steps = iter(range(10**6))

    def step(self: AccuracyTraining, *batch: torch.Tensor, step: Any = AccuracyTraining.step) -> torch.Tensor:
        if row in (None, "GPipe n8m4" if len(self.devices) > 1 else "plain") and next(steps) >= at:
            raise error
        return step(self, *batch)

    return step


@pytest.mark.slow
@pytest.mark.parametrize("at", range(0, TRAININGS * EPOCHS * STEPS, 3))
def test_a_run_that_was_stopped_in_any_step_goes_on_to_the_same_results(
    at: int, run: Run, uninterrupted: dict[str, Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(AccuracyTraining, "step", fail(Stop(), at))
        run()
    kept = sum(len(result.samples.get("epoch", [])) for result in run.results.values())
    assert kept == at // STEPS, "every epoch that was finished is in the record"

    torch.rand(3)  # another process has drawn other random numbers
    assert learnt(run()) == learnt(uninterrupted)
    assert ("going on from the checkpoints" in run.runs.said) == (kept > 0)
    resumed = [pair for result in run.results.values() for pair in result.values.get("resumed_after", [])]
    assert len(resumed) == (kept % EPOCHS > 0), "the training that had begun was continued"
    assert not run.checkpoints, "what is finished is in nobody's way"


@pytest.mark.parametrize("part", ["before", "after"])
def test_a_run_that_was_stopped_while_it_kept_an_epoch(
    part: str, run: Run, uninterrupted: dict[str, Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(self: Checkpoints, *arguments: Any, save: Any = Checkpoints.save) -> None:
        if part == "after":
            save(self, *arguments)
        raise Stop

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(Checkpoints, "save", stop)
        run()
    assert run.results["plain"].samples["epoch"] == [1], "the record has the epoch in any case"
    assert learnt(run()) == learnt(uninterrupted)


@pytest.mark.slow
def test_fresh_and_another_seed_start_anew(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise Stop

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr("reproduce.run.accuracy.run._OneTraining.retire", stop)
        run()
    first = learnt(run.results)
    assert len(run.checkpoints) == TRAININGS
    other = learnt(run(seed=5))
    assert other["plain"] != first["plain"] and "going on" not in run.runs.said
    assert learnt(run(fresh=True)) == first and "going on" not in run.runs.said


IN_WORKER = "Caught Error in DataLoader worker process 3.\nTraceback\nreproduce.error.Error: a.JPEG cannot be read"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory", "seed 0: out of memory"),
        (ValueError("no"), "failed", "seed 0: ValueError: no (test_run.py, line "),
        (RuntimeError(IN_WORKER), "failed", "seed 0: a.JPEG cannot be read"),
        (Error("no room"), "failed", "seed 0: no room"),
    ],
)
def test_a_row_that_fails_is_a_result_and_keeps_its_epochs(
    error: Exception, status: str, reason: str, run: Run, uninterrupted: dict[str, Result],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(AccuracyTraining, "step", fail(error, STEPS, "GPipe n8m4"))
        found = run()
    assert found["GPipe n8m4"].status == status and (found["GPipe n8m4"].reason or "").startswith(reason)
    assert found["GPipe n8m4"].samples["epoch"] == [1] and len(found["plain"].samples["epoch"]) == SEEDS * EPOCHS
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
        (True, ["--data", "/none"], "--data /none: no such folder; name one that has train/<class>/*.JPEG and val/"),
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
def test_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*ARGUMENTS, "--out", ".", "--row", "plain", "--seeds", "1"]) == 0
    out, _ = capsys.readouterr()
    assert max(map(len, out.splitlines())) <= WIDTH and "GPipe" not in out.replace("kakaobrain/torchgpipe", "")
    assert "mean +- standard deviation over 1 seed" in " ".join(out.split())
    (path,) = tmp_path.glob("*.json")
    record = load(path)
    assert [len(result.samples["epoch"]) for result in record.results] == [EPOCHS]
    assert record.run is not None and record.run.settings["seeds"] == 1
    assert record.run.settings["tiny-accuracy"]["made"]["train_size"] == 32
    assert main(["show", str(path)]) == 0
    assert not list((tmp_path / "checkpoints").glob("*.pt"))


@pytest.mark.slow
def test_a_run_goes_on_after_a_kill(start: Callable[..., Any], tmp_path: Path) -> None:
    arguments = (TINY, *ARGUMENTS, "--row", "plain", "--seeds", "1", "--out", str(tmp_path))
    process = start(*arguments, TINY_SLEEP="1", TINY_EPOCHS="20")
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and process.poll() is None and not list(tmp_path.glob("checkpoints/*.pt")):
        time.sleep(0.05)
    process.kill()
    _, err = process.communicate(timeout=PATIENCE)
    assert len(list(tmp_path.glob("checkpoints/*.pt"))) == 1, err
    (first,) = tmp_path.glob("*.json")
    assert load(first).results[0].samples["epoch"][0] == 1

    process = start(*arguments, TINY_EPOCHS="20")
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0 and "plain, seed 0: goes on after epoch " in err, err
    (second,) = set(tmp_path.glob("*.json")) - {first}
    (result,) = load(second).results
    assert result.samples["epoch"] == [float(epoch + 1) for epoch in range(20)]
    ((seed, epoch),) = result.values["resumed_after"]
    assert seed == 0 and epoch >= 1
