"""Accuracy runs: every epoch is kept, and whatever ends a run, the next one goes on to the same results."""

from __future__ import annotations

import re
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from reproduce.cli.main import main
from reproduce.records.record import Result, load
from reproduce.run.accuracy import run as run_module
from reproduce.run.accuracy.datasets import prepare
from reproduce.run.accuracy.run import SERIES, AccuracyTraining
from reproduce.run.session import UNITS
from reproduce.tables.layout import WIDTH

pytest.importorskip("torchvision", exc_type=Exception)  # type: ignore[arg-type]
EXPERIMENT = runpy.run_path(str(Path(__file__).parents[2] / "tiny.py"))["TINY"]["tiny-accuracy"]
STEPS, EPOCHS = 2, 2  # of its trainings: two rows from two seeds each
GPIPE = "GPipe n8m4"


def train(runs: Any, seed: int = 0) -> dict[str, Result]:
    scale = EXPERIMENT.scale("small")
    found: dict[str, Result] = runs(EXPERIMENT, scale, seed, accuracy=prepare(EXPERIMENT.name, scale, None, seed, None))
    return found


@pytest.fixture(scope="module")
def uninterrupted(runner: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    return train(runner(tmp_path_factory.mktemp("run")))


def learnt(results: Mapping[str, Result]) -> dict[str, Any]:
    """Return all that does not depend on the clock, or on how often the run was stopped."""
    return {row: (result.status, {**result.samples, "epoch_time": None}) for row, result in results.items()}


def test_every_epoch_of_every_seed_is_in_the_record(uninterrupted: dict[str, Result]) -> None:
    assert list(uninterrupted) == ["plain", GPIPE], "on two devices, for no clock is involved"
    for result in uninterrupted.values():
        assert result.status == "measured" and tuple(result.samples) == SERIES
        assert result.samples["seed"] == [0, 0, 1, 1] and result.samples["epoch"] == [1, 2, 1, 2]
        assert result.samples["learning_rate"] == pytest.approx(2 * [0.0125, 0.00125])
        assert all(0 <= error <= 100 for error in result.samples["top1_error"])
        assert min(result.samples["epoch_time"]) > 0 and result.values == {"samples_per_epoch": 32}
        assert set(result.samples) | set(result.values) <= set(UNITS)
    assert uninterrupted["plain"].samples["train_loss"][0] != uninterrupted["plain"].samples["train_loss"][2]


class Stop(BaseException):
    """Stand for whatever ends a run at once."""


def fail(monkeypatch: pytest.MonkeyPatch, error: BaseException, at: int, where: str = "step", row: str = "") -> None:
    """Let training steps from the one numbered `at` on raise, of a row if given; or other calls, when they are done."""
    owner: Any = AccuracyTraining if where == "step" else run_module
    call, calls = getattr(owner, where), iter(range(10**6))

    def failing(*arguments: Any) -> Any:
        if row and arguments[0].row.name != row:
            return call(*arguments)
        fails = next(calls) >= at
        result = None if fails and where == "step" else call(*arguments)
        if fails:
            raise error
        return result

    monkeypatch.setattr(owner, where, failing)


@pytest.mark.parametrize(
    ("where", "at", "kept"),
    [
        ("step", 3, 1),
        ("save_checkpoint", 0, 1),
        pytest.param("step", 0, 0, marks=pytest.mark.slow),
        pytest.param("step", 2 * STEPS * EPOCHS + 3, 5, marks=pytest.mark.slow),
        pytest.param("step", 4 * STEPS * EPOCHS - 1, 7, marks=pytest.mark.slow),
        pytest.param("write_atomically", 2, 3, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_was_stopped_goes_on_to_the_same_results_to_the_bit(
    where: str, at: int, kept: int, runs: Any, uninterrupted: dict[str, Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(Stop):
        fail(patch, Stop(), at, where)
        train(runs)
    assert sum(len(result.samples.get("epoch", [])) for result in runs.results.values()) == kept

    assert learnt(train(runs)) == learnt(uninterrupted)
    assert sum(map(int, re.findall(r"goes on after epoch (\d+)", runs.said))) == kept
    assert not list(runs.folder.glob("checkpoints/*")), "what is finished is in nobody's way"


@pytest.mark.slow
def test_only_a_whole_checkpoint_of_the_same_training_is_used(runs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "_put_away", lambda *_: None)
    first = learnt(train(runs))
    assert learnt(train(runs, seed=1))["plain"] != first["plain"] and "goes on" not in runs.said
    min(runs.folder.glob("checkpoints/*-GPipe-*-seed0-*.pt")).write_bytes(b"not a checkpoint")
    reason = str(train(runs)[GPIPE].reason)
    assert reason.endswith(" cannot be read as a checkpoint (UnpicklingError); delete it") and "\n" not in reason


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory", "seed 0: out of memory"),
        (ValueError("no"), "failed", "seed 0: ValueError: no (test_run.py, line "),
    ],
)
def test_a_row_that_fails_is_a_result_and_keeps_its_epochs(
    error: Exception, status: str, reason: str, runs: Any, uninterrupted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fail(patch, error, STEPS, row=GPIPE)
        found = train(runs)
    assert found[GPIPE].status == status and (found[GPIPE].reason or "").startswith(reason)
    assert found[GPIPE].samples["epoch"] == [1] and len(found["plain"].samples["epoch"]) == 2 * EPOCHS
    assert any(runs.folder.glob("checkpoints/*")) == (status == "failed"), "without memory, it would end so again"
    assert learnt(train(runs)) == learnt(uninterrupted), "the next run goes on, now that the cause is gone"


def test_a_training_that_diverges_is_told(runs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AccuracyTraining, "step", lambda self, *batch: torch.tensor(float("nan")))
    plain = train(runs)["plain"]
    assert (plain.status, plain.samples["epoch"]) == ("failed", [])
    assert "the loss is nan in epoch 1: the training has diverged" in (plain.reason or "")


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
    capsys.readouterr()
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert "plain, seed 0: goes on after epoch 1 of 2, in\n" in err
    assert max(map(len, out.splitlines())) <= WIDTH and "GPipe" not in out.replace("kakaobrain/torchgpipe", "")
    (path,) = set(tmp_path.glob("*.json")) - {first}
    assert [result.samples["epoch"] for record in map(load, (first, path)) for result in record.results] == [
        [1],
        [1, 2],
    ]
    settings: Any = load(path).run
    assert settings.settings["seeds"] == 1 and settings.settings["tiny-accuracy"]["made"]["train_size"] == 32
