"""The watch of a rank: who is named, and for what; what becomes of real processes is tested with failures."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from torchgpipe.distributed.liveness.watch import Activity, Label, Watch

PATIENCE = 20.0


@contextmanager
def watching(
    silence: float | None, heard: tuple[int, ...] = (), *, waits: bool = False
) -> Iterator[tuple[Watch, Activity, SimpleQueue[str]]]:
    """Let rank 0 watch three others, of which some are heard all the time."""
    activity, wrong = Activity(), SimpleQueue[str]()
    label = Label(1, waits, "at home")

    made: list[Watch] = []

    def beat(peer: int, own: Label) -> None:
        for watch in made * (peer in heard):
            watch.heard(peer, label)

    watch = Watch(0, [1, 2, 3], activity, silence, beat, wrong.put)
    made.append(watch)
    for peer in (1, 2, 3):
        watch.heard(peer, label)
    try:
        yield watch, activity, wrong
    finally:
        watch.stop()
        watch.thread.join()


@pytest.mark.parametrize("silence", [0.5, None])
def test_a_rank_that_has_ended_may_be_silent(silence: float | None) -> None:
    with watching(silence, heard=(2,)) as (watch, _, wrong):
        if silence is not None:
            watch.forget(1)
            watch.forget(3)
        time.sleep(1.5)
        assert wrong.empty()


def test_ranks_that_have_ended_are_named_where_all_others_wait() -> None:
    with (
        watching(0.5, heard=(1, 2), waits=True) as (watch, activity, wrong),
        activity.call(4, "the call", None),
        activity.hearing(),
    ):
        watch.forget(3)
        assert "ranks 1, 2 were at home; rank 3 had ended. Has a rank left out" in wrong.get(timeout=PATIENCE)


@pytest.mark.usefixtures("without_ranks")
def test_a_task_of_sharded_layers_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may wait for a rank of another pipeline."""
    monkeypatch.setattr("torchgpipe.distributed.liveness.watch.sharded", lambda modules: set(modules))
    program: Any = SimpleNamespace(doing="a task", computing="a task", stage=SimpleNamespace(partition=nn.Linear(1, 1)))
    with watching(0.5, heard=(1, 2, 3)) as (_, activity, wrong), activity.call(4, "the call", program):
        time.sleep(1.5)
        assert wrong.empty()


def test_labels_have_one_size() -> None:
    """Messages of another shape would be described anew, and descriptions are kept."""
    for words in ("", "outside", "ü" * 500):
        packed = Label(7, True, words).packed()
        assert len(packed) == len(Label(0, False, "").packed())
        assert Label.unpacked(packed) == Label(7, True, words[:100])
