"""Saved states are whole or not there, wherever the process dies that saves, and of one job only."""

import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from torchgpipe.state.saves import Saves

from ...behaviours.compare import differences
from ..distributed.training import adam, trained
from .test_saves import piped

PATIENCE = 300  # seconds; only a hang takes as long


def forked(run: Callable[[], object]) -> int:
    """Run something in a process of its own; return its exit code, or minus the signal that ended it."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of threads: this one has none that matter
        child = os.fork()
    if not child:
        try:
            run()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def a_second_job_is_refused(tmp_path: Path) -> None:
    model = piped(1)
    optimizer = adam(model)
    first = Saves(tmp_path)
    first.save(0, model, optimizer)

    def again() -> None:
        Saves(tmp_path).save(1, model, optimizer)

    def second() -> None:
        with pytest.raises(
            RuntimeError, match=r"another job saves into .* give each job a folder of its own"
        ):
            again()

    assert forked(second) == 0
    again()  # this process holds the lock
    assert forked(second) == 0, "the lock is still held"
    first.save(0, model, optimizer)
    assert first.load(model, optimizer) == {"step": 0}
    shutil.copytree(tmp_path, tmp_path / "copy")
    assert forked(second) == 0, "the lock is still held when a copy has read its file"

    files = len(os.listdir("/proc/self/fd"))
    del first
    assert forked(again) == 0, "the lock is held though nobody needs it"
    assert len(os.listdir("/proc/self/fd")) < files

    reading, writing = os.pipe()

    def leaves_a_process() -> None:
        saves = Saves(tmp_path)
        saves.save(2, model, optimizer)
        if not os.fork():
            os.close(writing)
            os.read(reading, 1)  # until the other end is closed

    assert forked(leaves_a_process) == 0
    assert forked(again) == 0, "a process that a job has left holds its lock"
    os.close(writing)


def dies_at(operation: int, folder: Path) -> None:
    """Kill this process before the n-th file operation in a folder."""
    left = operation

    def count(name: str, *_: object) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sync = os.fsync

    def fsync(file: Any) -> None:
        count("fsync")
        sync(file)
        count("synced")

    def audit(event: str, given: Any) -> None:
        if event.startswith(("open", "os.", "shutil.")) and given and str(folder) in str(given[0]):
            count(event)

    os.fsync = fsync  # type: ignore[assignment]
    sys.addaudithook(audit)


def a_state_is_whole_or_not_there(tmp_path: Path) -> None:
    """Wherever the process dies while it saves, there is the state before or this one, each of them whole."""
    os.fsync = lambda fd: None  # it is only needed where the machine crashes
    saved = [piped(k) for k in (1, 2)]
    optimizers = [*map(adam, saved)]
    for model, optimizer in zip(saved, optimizers, strict=True):
        trained(model, optimizer, 1, [8])
    Saves(tmp_path / "first", keep=1).save(0, saved[0], optimizers[0])
    loaded, found = piped(3), set()
    for k in range(1000):
        folder = tmp_path / str(k)
        shutil.copytree(tmp_path / "first", folder)

        def child(k: int = k, folder: Path = folder) -> None:
            dies_at(k, folder)
            Saves(folder, keep=1).save(1, saved[1], optimizers[1])

        ended = forked(child) == 0
        optimizer = adam(loaded)
        state = Saves(folder).load(loaded, optimizer)
        assert state is not None
        step = state["step"]
        assert (
            differences(
                (loaded, optimizer.state_dict()), (saved[step], optimizers[step].state_dict())
            )
            == []
        )
        found.add((ended, step))
        Saves(folder, keep=1).save(2, loaded, optimizer)
        assert len([*folder.iterdir()]) == 2  # the state and the lock
        if ended:
            break
    assert found == {(False, 0), (False, 1), (True, 1)}


@pytest.mark.parametrize("run", [a_second_job_is_refused, a_state_is_whole_or_not_there])
def test_in_a_new_process(run: Callable[[Path], None], tmp_path: Path) -> None:
    """It may fork: this one has threads of other tests, and what they locked."""
    process = get_context("spawn").Process(target=run, args=(tmp_path,))
    process.start()
    process.join(PATIENCE)
    process.kill()
    process.join()
    assert process.exitcode == 0
