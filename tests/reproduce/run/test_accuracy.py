"""Tests of accuracy runs, which train a model to the end and save its state in every epoch.

If a run is interrupted at any place, the next run must continue it and get the same results.
"""

import io
import itertools
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from msgspec import structs

from reproduce.error import Unwritable
from reproduce.machine.devices import Devices
from reproduce.records.record import Result, is_continued, save
from reproduce.run import accuracy, recorder
from reproduce.run.accuracy import SERIES, AccuracyTraining
from reproduce.run.session import UNITS
from reproduce.tables.layout import WIDTH

from ..made import one_line
from ..tiny import TINY
from .conftest import Runner

pytest.importorskip("torchvision", exc_type=Exception)  # type: ignore[arg-type]
NAME = "tiny-accuracy"
GPIPE = "GPipe n8m4"
# The steps in an epoch, and the epochs in a training. Two rows are trained with two seeds each.
STEPS, EPOCHS = 2, 2
ROW: Any = TINY[NAME].scale("small").rows[0]
CPU = Devices("cpu", 2, threads=1)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    run = Runner(tmp_path_factory.mktemp("run"))
    return run(NAME)


def learnt(results: Mapping[str, Result]) -> dict[str, Any]:
    """Return the statuses and samples of results, but not the times of epochs.

    All that is returned must be equal in an interrupted and an uninterrupted run.
    """
    found = {}
    for row, result in results.items():
        samples = {**result.samples, "epoch_time": None}
        found[row] = result.status, samples
    return found


def test_every_epoch_of_every_seed_is_in_the_record(uninterrupted: dict[str, Result]) -> None:
    assert list(uninterrupted) == ["plain", GPIPE], "on two devices, for no clock is involved"
    for result in uninterrupted.values():
        samples = result.samples
        assert result.status == "measured"
        assert tuple(samples) == SERIES
        assert samples["seed"] == [0, 0, 1, 1]
        assert samples["epoch"] == [1, 2, 1, 2]
        assert samples["learning_rate"] == pytest.approx(2 * [0.0125, 0.00125])
        for error in samples["top1_error"]:
            assert 0 <= error <= 100
        assert min(samples["epoch_time"]) > 0
        assert result.values == {"samples_per_epoch": 32}
        assert {*samples, *result.values} <= set(UNITS)
    losses = uninterrupted["plain"].samples["train_loss"]
    assert losses[0] != losses[2], "of two seeds"


def test_parameters_at_the_start_depend_on_the_seed_alone() -> None:
    starts = []
    for seed in (3, 3, 4):
        torch.rand(7)  # other random numbers that were drawn before
        training = AccuracyTraining(ROW, CPU, seed, STEPS)
        starts.append(torch.cat([p.flatten() for p in training.layers.parameters()]))
    first, again, other = starts
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def fail(
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    at: int,
    where: str = "step",
    row: str = "",
) -> None:
    """Make a function of an accuracy run raise an error, from a given call on.

    Args:
        monkeypatch: The fixture that replaces the function.
        error: The error.
        at: The index of the first call that raises, counted from 0.
        where: The name of the function. `step` raises before it does anything, and any other
            function raises after it has done its work.
        row: The name of a row (configuration). Only calls for this row are counted and raise. If
            the name is empty, the calls for all rows are counted and raise.
    """
    owner: Any = AccuracyTraining if where == "step" else accuracy
    call = getattr(owner, where)
    calls = itertools.count()

    def failing(*arguments: Any) -> Any:
        if row and arguments[0].row.name != row:
            return call(*arguments)
        fails = next(calls) >= at
        if fails and where == "step":
            raise error
        result = call(*arguments)
        if fails:
            raise error
        return result

    monkeypatch.setattr(owner, where, failing)


@pytest.mark.quick(1)
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
    where: str,
    at: int,
    kept: int,
    run: Any,
    uninterrupted: dict[str, Result],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        fail(patch, KeyboardInterrupt(), at, where)
        stopped = run(NAME, status=130)
    finished = run(NAME)

    assert sum(len(result.samples.get("epoch", [])) for result in stopped.values()) == kept
    assert learnt(finished) == learnt(uninterrupted)
    epochs = re.findall(r"goes on after epoch (\d+) of 2, in\n", run.said)
    assert sum(map(int, epochs)) == kept
    assert not list(run.folder.glob("checkpoints/*")), "checkpoints of a finished run are deleted"
    tables, _, _ = run.out.partition("written:")
    assert max(map(len, tables.splitlines())) <= WIDTH


def test_what_was_trained_to_the_end_is_not_trained_again(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that `--resume` keeps finished trainings, whose checkpoints have been deleted.

    The run can have been interrupted later, in another experiment.
    """
    finished = run(NAME)
    record = structs.replace(run.record, run=structs.replace(run.record.run, state="interrupted"))
    (path,) = run.folder.glob("*.json")
    save(record, path)
    monkeypatch.setattr(accuracy, "_train", lambda *_: pytest.fail("it was trained again"))
    again = run(NAME, "--resume")
    assert again == finished
    assert run.record.run.state == "finished"


def test_rows_and_seeds_may_be_chosen(run: Any, uninterrupted: dict[str, Result]) -> None:
    found = run(NAME, "--row=plain", "--seeds=1")

    assert list(found) == ["plain"]
    samples = found["plain"].samples
    for name, series in uninterrupted["plain"].samples.items():
        if name != "epoch_time":
            assert samples[name] == series[:EPOCHS]
    settings = run.record.run.settings
    assert settings["seeds"] == 1
    assert settings[NAME]["made"]["train_size"] == 32


@pytest.mark.slow
def test_only_a_whole_checkpoint_of_the_same_training_is_used(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accuracy, "_put_away", lambda *_: None)
    first = learnt(run(NAME))
    other = learnt(run(NAME, "--seed=1"))
    assert other["plain"] != first["plain"]
    assert "goes on" not in run.said

    checkpoint = min(run.folder.glob("checkpoints/*-GPipe-*-seed0-*.pt"))
    checkpoint.write_bytes(b"not a checkpoint")
    reason = run(NAME, status=2)[GPIPE].reason
    assert " cannot be read as a checkpoint of a training (UnpicklingError); delete" in reason
    assert "\n" not in reason


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory", "seed 0: out of memory"),
        (ValueError("no"), "failed", "seed 0: ValueError: no (test_accuracy.py, line "),
    ],
)
def test_a_row_that_fails_is_a_result_and_keeps_its_epochs(
    error: Exception,
    status: str,
    reason: str,
    run: Any,
    uninterrupted: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failed = status == "failed"
    with monkeypatch.context() as patch:
        fail(patch, error, STEPS, row=GPIPE)
        found = run(NAME, status=2 if failed else 0)

    plain, gpipe = found["plain"], found[GPIPE]
    assert gpipe.status == status
    assert gpipe.reason.startswith(reason)
    assert gpipe.samples["epoch"] == [1]
    assert len(plain.samples["epoch"]) == 2 * EPOCHS
    checkpoints = list(run.folder.glob("checkpoints/*"))
    assert bool(checkpoints) == failed, "a row that is out of memory does not go on"
    again = run(NAME)
    assert learnt(again) == learnt(uninterrupted), "the cause of the failure is gone"


def test_a_training_that_diverges_is_told(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    nan = torch.tensor(float("nan"))
    monkeypatch.setattr(AccuracyTraining, "step", lambda self, *batch: nan)
    plain = run(NAME, status=2)["plain"]
    assert plain.status == "failed"
    assert plain.samples["epoch"] == []
    assert "the loss is nan in epoch 1: the training has diverged" in plain.reason


def test_the_learning_rate_follows_the_recipe_and_wrong_classes_are_counted() -> None:
    """Check three things about a training: its learning rates, its saved state, and its errors.

    The learning rates must follow the recipe. The saved state, which includes the state of the
    random generator, can be loaded. The error must be the share of wrong classes.
    """
    rate = {"base_lr": 0.1, "base_batch_size": 4, "warmup_epochs": 1}
    recipe = replace(ROW.recipe, **rate, lr_decay_epochs=(2,), lr_decay=0.5)
    row = replace(ROW, recipe=recipe)
    first = AccuracyTraining(row, CPU, 3, STEPS)
    second = AccuracyTraining(row, CPU, 99, STEPS)
    images, labels = torch.rand(16, 3, 32, 32), torch.arange(16) % 8
    rates = []
    for _ in range(6):
        rates.append(first.learning_rate)
        first.step(images, labels)
        assert first.optimizer.param_groups[0]["lr"] == rates[-1]
    assert rates == pytest.approx([0.1, 0.25, 0.4, 0.4, 0.2, 0.2])

    random = torch.get_rng_state()
    file = io.BytesIO()
    torch.save(first.state(), file)
    torch.rand(7)
    file.seek(0)
    second.load(torch.load(file, weights_only=True))
    assert torch.get_rng_state().equal(random)

    with torch.no_grad():
        scores = first.model.eval()(images)
    classes = scores.argmax(dim=1)
    classes[:4] = (classes[:4] + 1) % 8  # four of sixteen are wrong
    batches = [(images[:7], classes[:7]), (images[7:], classes[7:])]
    assert second.top1_error(batches) == 25
    assert second.model.training


def test_a_run_that_goes_on_from_a_checkpoint_says_so(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a record says which of its epochs an earlier run has trained.

    Otherwise, the time and the versions of the later run would seem to be those of all epochs.
    """
    with monkeypatch.context() as patch:
        fail(patch, KeyboardInterrupt(), STEPS + 1)
        run(NAME, status=130)
    first = run.record
    monkeypatch.setattr(recorder, "described", lambda recorder: "of now")
    run(NAME)

    (note,) = run.record.notes
    assert note.startswith("plain, seed 0: epochs up to 1 were trained by earlier runs: of 20")
    assert not is_continued(first)
    assert is_continued(run.record)
    assert note in one_line(run.out)


def test_without_room_for_checkpoints_no_other_row_is_trained(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = Mock(side_effect=Unwritable("x.pt: cannot be written (No space left on device)"))
    monkeypatch.setattr(accuracy, "write_atomically", written)
    run(NAME, status=2, early=True)
    written.assert_called_once()
