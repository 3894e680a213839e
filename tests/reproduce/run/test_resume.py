"""Tests of runs that are interrupted and continued, which must keep all that was finished."""

import contextlib
import errno
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from reproduce.error import Error
from reproduce.machine.load import Load
from reproduce.records.record import Result, load
from reproduce.run.groups import (
    LARGEST_SHARE,
    PlannedTask,
    _is_done,
    least_steps,
    takes_too_long,
)
from reproduce.run.recorder import new_recorder

from ..made import record as made_record
from ..made import row as made_row
from .conftest import EVERY, ROWS, Fake

NONE = torch.OutOfMemoryError("CUDA out of memory")


def test_an_interruption_right_after_a_step_keeps_the_step(
    fake: type[Fake], run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        if fake.order.count("GPipe n2m4") == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("reproduce.run.speed.check_same", interrupt)  # called after each step

    found = run("tiny-speed", "--steps=5", status=130)

    kept = {name: len(each.samples.get("step_time", [])) for name, each in found.items()}
    assert Counter(kept) == Counter(fake.order)
    assert len(found["GPipe n2m4"].samples["round"]) == 2


@pytest.mark.parametrize("row", ["GPipe n2m4", "GPipe n8m4 emulated"])
@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("between", [False, True])
def test_an_interruption_keeps_every_step(
    fake: type[Fake], run: Any, at: int, row: str, between: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check() -> None:
        if fake.order.count(row) == at:
            raise KeyboardInterrupt

    def steps_of(results: dict[str, Result]) -> dict[str, int]:
        return {name: len(each.samples.get("step_time", [])) for name, each in results.items()}

    lost = Counter({row: 0 if between else 1})  # the step that is interrupted
    interruptible = "reproduce.cli.run.interruptible"
    if between:
        monkeypatch.setattr(interruptible, lambda: contextlib.nullcontext(check))
    else:
        fake.raises[row] = lambda _: check()

    found = run("tiny-speed", "--steps=5", status=130)

    kept = Counter(steps_of(found))
    assert kept + lost == Counter(fake.order)
    assert set(EVERY) <= set(found)
    without_steps = {name for name in EVERY if kept[name] == 0}
    for name, result in found.items():
        assert (result.status == "interrupted") == (name in without_steps)

    fake.raises.clear()
    monkeypatch.setattr(interruptible, lambda: contextlib.nullcontext(lambda: None))
    run("tiny-speed", "--steps=4", "--resume", status=2)
    again = run("tiny-speed", "--steps=5", "--resume")

    assert run.record.run.state == "finished"
    steps = steps_of(again)
    assert {name for name in steps if steps[name] > 0} == set(EVERY)
    assert 5 in kept.values(), "a row was finished"
    ran = Counter(fake.order) - lost
    groups = {each.name: each.group for each in ROWS}
    broken_groups = {groups[name.removesuffix(" emulated")] for name in without_steps}
    for name in EVERY:
        assert steps[name] in (5, 6), "a round that was broken off is run again"
        run_anew = ran[name] != steps[name]
        in_broken_group = groups[name.removesuffix(" emulated")] in broken_groups
        assert run_anew == (kept[name] > 0 and in_broken_group), "other steps are kept"
        if kept[name] == 5:
            assert steps[name] == 5, "a row that was finished is not run again"
    for name, result in again.items():
        rounds = result.samples.get("round", [])
        assert len(set(rounds)) == steps[name], "each round has its own number"


def test_a_row_without_memory_is_run_alone_when_a_run_is_continued(
    fake: type[Fake], run: Any
) -> None:
    def alone(_: int) -> Exception | None:
        return None if fake.alive == {"GPipe n2m4"} else NONE

    def interrupt(done: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    fake.raises["GPipe n2m4"] = alone
    fake.raises["naive n2"] = interrupt
    found = run("tiny-speed", "--steps=5", "--no-emulate", status=130)
    assert found["GPipe n2m4"].status == "out of memory"

    del fake.raises["naive n2"]
    again = run("tiny-speed", "--steps=5", "--no-emulate", "--resume")
    assert again["GPipe n2m4"].status == "measured"
    assert len(again["naive n2"].samples["step_time"]) >= 5


def test_what_was_measured_is_kept_even_if_it_takes_too_long_now(
    fake: type[Fake], run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(done: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    fake.raises["naive n2"] = interrupt
    found = run("tiny-speed", "--steps=5", status=130)
    assert found["naive n2"].samples["step_time"]

    fake.raises.clear()
    monkeypatch.setattr("reproduce.run.speed.takes_too_long", lambda *_: True)
    again = run("tiny-speed", "--steps=5", "--resume")
    assert again["naive n2"].status == "measured"
    assert len(again["naive n2"].samples["step_time"]) >= 5


@pytest.mark.parametrize(("steps", "done"), [(2, False), (3, True)])
def test_rows_of_other_schedules_are_done_after_enough_rounds(steps: int, done: bool) -> None:
    session: Any = SimpleNamespace(steps=None, scale=SimpleNamespace(steps=10, least_steps=3))
    task = PlannedTask(ROWS[0], False, "ScheduleGPipe")
    found = made_row("n2m1", [1.0] * steps, engine="ScheduleGPipe")
    assert _is_done(session, task, found) == done


def test_two_runs_in_one_second_have_files_of_their_own(tmp_path: Path) -> None:
    empty = made_record()
    recorders = [new_recorder(tmp_path, ["e"], empty) for _ in range(2)]
    one, other = (recorder.path for recorder in recorders)
    assert one != other
    assert [load(path).name for path in (one, other)] == [one.stem, other.stem]


def test_no_empty_file_is_left_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(Error, match="No space left on device"):
        new_recorder(tmp_path, ["e"], made_record())
    assert list(tmp_path.iterdir()) == []


def test_memory_that_was_measured_is_kept(fake: type[Fake], run: Any) -> None:
    """Check that a run that is continued measures only the rows that have no numbers yet."""

    def interrupt(_: int) -> Exception | None:
        raise KeyboardInterrupt

    fake.raises["pipeline-2"] = interrupt
    found = run("tiny-memory", status=130)
    kept = [name for name, each in found.items() if each.status == "measured"]
    ran = [name for name in kept if not name.endswith("paper")]
    assert ran == ["baseline", "pipeline-1"]

    fake.raises.clear()
    fake.order.clear()
    again = run("tiny-memory", "--resume")
    assert not set(ran) & set(fake.order)
    assert all(again[name] == found[name] for name in kept)
    assert {each.status for each in again.values()} == {"measured"}
    assert run.record.run.state == "finished"


def test_rounds_that_were_left_out_count_when_a_run_is_continued() -> None:
    task = PlannedTask(ROWS[0], False)
    found = made_row("n2m1", [1.0], values={"disturbed_rounds": 2})
    assert task.continued(found).left_out == 2
    assert task.continued(made_row("n2m1", [1.0])).left_out == 0


def test_epochs_that_a_publication_does_not_time_count_as_a_warm_up() -> None:
    """Check that a row whose warm-up takes too much of its group's time is not measured."""
    session: Any = SimpleNamespace(scale=SimpleNamespace(least_steps=5, warmup=2))
    group: Any = SimpleNamespace(limit=100.0)
    short = PlannedTask(replace(ROWS[0], skip_epochs=0, steps_per_epoch=200), False)
    long = PlannedTask(replace(ROWS[0], skip_epochs=1, steps_per_epoch=200), False)
    for task, steps in ((short, 7), (long, 205)):
        assert least_steps(session, task) == steps
        assert not takes_too_long(session, group, task, LARGEST_SHARE * 100.0 / steps)
        assert takes_too_long(session, group, task, LARGEST_SHARE * 101.0 / steps)


def test_an_interruption_in_a_disturbed_round_keeps_the_good_rounds(
    fake: type[Fake], run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a disturbed round that Ctrl-C breaks off is left out, if others are enough.

    Otherwise the rows would count as disturbed, and `--resume` would run all rounds again.
    """
    monkeypatch.setattr(Load, "begin", lambda self: setattr(self, "left", iter([0.0] * 3)))
    monkeypatch.setattr(Load, "round", lambda self: {"others": next(self.left, 0.2)})

    def interrupt(*_: object) -> None:
        if fake.order.count("GPipe n2m4") == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("reproduce.run.speed.check_same", interrupt)
        found = run("tiny-speed", "--steps=5", status=130, least_steps=3)
    assert not any(result.disturbed for result in found.values())
    assert len(found["GPipe n2m4"].samples["step_time"]) == 3
