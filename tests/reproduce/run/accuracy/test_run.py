"""Accuracy runs: every epoch is saved; after any interruption, the next run resumes and gets the same results."""

import io
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from reproduce.machine.devices import Devices
from reproduce.records.record import Result
from reproduce.run.accuracy import run as run_module
from reproduce.run.accuracy.run import SERIES, AccuracyTraining
from reproduce.run.session import UNITS
from reproduce.tables.layout import WIDTH

from ...tiny import TINY
from ..conftest import Runner

pytest.importorskip("torchvision", exc_type=Exception)  # type: ignore[arg-type]
NAME, GPIPE = "tiny-accuracy", "GPipe n8m4"
STEPS, EPOCHS = 2, 2  # of each training; there are two rows, with two seeds each
ROW: Any = TINY[NAME].scale("small").rows[0]
CPU = Devices("cpu", 2, threads=1)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    return Runner(tmp_path_factory.mktemp("run"))(NAME)


def learnt(results: Mapping[str, Result]) -> dict[str, Any]:
    """Return the results that depend neither on the clock nor on interruptions."""
    return {
        row: (result.status, {**result.samples, "epoch_time": None})
        for row, result in results.items()
    }


def test_every_epoch_of_every_seed_is_in_the_record(uninterrupted: dict[str, Result]) -> None:
    assert list(uninterrupted) == ["plain", GPIPE], "on two devices, for no clock is involved"
    for result in uninterrupted.values():
        assert result.status == "measured" and tuple(result.samples) == SERIES
        assert result.samples["seed"] == [0, 0, 1, 1] and result.samples["epoch"] == [1, 2, 1, 2]
        assert result.samples["learning_rate"] == pytest.approx(2 * [0.0125, 0.00125])
        assert all(0 <= error <= 100 for error in result.samples["top1_error"])
        assert min(result.samples["epoch_time"]) > 0 and result.values == {"samples_per_epoch": 32}
        assert set(result.samples) | set(result.values) <= set(UNITS)
    assert (
        uninterrupted["plain"].samples["train_loss"][0]
        != uninterrupted["plain"].samples["train_loss"][2]
    )


def fail(
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    at: int,
    where: str = "step",
    row: str = "",
) -> None:
    """Make training steps raise from number `at` on, of one row if given; or make other calls raise at their end."""
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
    where: str,
    at: int,
    kept: int,
    run: Any,
    uninterrupted: dict[str, Result],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        fail(patch, KeyboardInterrupt(), at, where)
        results = run(NAME, status=130)
    assert sum(len(result.samples.get("epoch", [])) for result in results.values()) == kept
    assert learnt(run(NAME)) == learnt(uninterrupted)
    assert sum(map(int, re.findall(r"goes on after epoch (\d+) of 2, in\n", run.said))) == kept
    assert not list(run.folder.glob("checkpoints/*")), "what is finished is in nobody's way"
    assert max(map(len, run.out.partition("written:")[0].splitlines())) <= WIDTH


def test_rows_and_seeds_may_be_chosen(run: Any, uninterrupted: dict[str, Result]) -> None:
    found = run(NAME, "--row=plain", "--seeds=1")
    first = {name: each[:EPOCHS] for name, each in uninterrupted["plain"].samples.items()}
    assert {**found["plain"].samples, "epoch_time": None} == {**first, "epoch_time": None}
    settings = run.record.run.settings
    assert (
        [*found] == ["plain"]
        and settings["seeds"] == 1
        and settings[NAME]["made"]["train_size"] == 32
    )


@pytest.mark.slow
def test_only_a_whole_checkpoint_of_the_same_training_is_used(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "_put_away", lambda *_: None)
    first = learnt(run(NAME))
    assert learnt(run(NAME, "--seed=1"))["plain"] != first["plain"] and "goes on" not in run.said
    min(run.folder.glob("checkpoints/*-GPipe-*-seed0-*.pt")).write_bytes(b"not a checkpoint")
    reason = run(NAME, status=2)[GPIPE].reason
    assert (
        reason.endswith(" cannot be read as a checkpoint (UnpicklingError); delete it")
        and "\n" not in reason
    )


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory", "seed 0: out of memory"),
        (ValueError("no"), "failed", "seed 0: ValueError: no (test_run.py, line "),
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
    with monkeypatch.context() as patch:
        fail(patch, error, STEPS, row=GPIPE)
        found = run(NAME, status=2 * (status == "failed"))
    assert found[GPIPE].status == status and found[GPIPE].reason.startswith(reason)
    assert (
        found[GPIPE].samples["epoch"] == [1] and len(found["plain"].samples["epoch"]) == 2 * EPOCHS
    )
    assert any(run.folder.glob("checkpoints/*")) == (status == "failed"), (
        "without memory, it would end so again"
    )
    assert learnt(run(NAME)) == learnt(uninterrupted), (
        "the next run goes on, now that the cause is gone"
    )


def test_a_training_that_diverges_is_told(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AccuracyTraining, "step", lambda self, *batch: torch.tensor(float("nan")))
    plain = run(NAME, status=2)["plain"]
    assert (plain.status, plain.samples["epoch"]) == ("failed", [])
    assert "the loss is nan in epoch 1: the training has diverged" in plain.reason


def test_the_learning_rate_follows_the_recipe_and_wrong_classes_are_counted() -> None:
    """The state is saved to a file like a checkpoint. Random numbers drawn in between do not matter."""
    recipe = replace(
        ROW.recipe,
        base_lr=0.1,
        base_batch_size=4,
        warmup_epochs=1,
        lr_decay_epochs=(2,),
        lr_decay=0.5,
    )
    first, second = (
        AccuracyTraining(replace(ROW, recipe=recipe), CPU, seed, STEPS) for seed in (3, 99)
    )
    images, labels = torch.rand(16, 3, 32, 32), torch.arange(16) % 8
    rates = []
    for _ in range(6):
        rates.append(first.learning_rate)
        first.step(images, labels)
        assert first.optimizer.param_groups[0]["lr"] == rates[-1]
    assert rates == pytest.approx([0.1, 0.25, 0.4, 0.4, 0.2, 0.2])

    random = torch.get_rng_state()
    torch.save(first.state(), file := io.BytesIO())
    torch.rand(7)
    second.load(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    assert torch.get_rng_state().equal(random)
    with torch.no_grad():
        right = first.model.eval()(images).argmax(dim=1)
    right[:4] = (right[:4] + 1) % 8
    assert (
        second.top1_error([(images[:7], right[:7]), (images[7:], right[7:])]) == 25
        and second.model.training
    )
