"""Test that a crash during a save leaves a complete state or none.

The tests also check that only one job can save at a time.
"""

import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchgpipe.state.saves import Saves

from ...behaviours.compare import differences
from ...start import forking
from ..distributed.training import adam, trained
from .test_saves import piped

PATIENCE = 300  # seconds; a test takes as long only if it hangs


def forked(run: Callable[[], object]) -> int:
    """Run a function in a forked process, and return the exit code.

    If a signal has ended the process, the code is the negative number of the signal.
    """
    with warnings.catch_warnings():
        # Python warns about a fork if the process has other threads. Here these threads do no harm.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            run()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def a_second_job_is_refused(tmp_path: Path) -> None:
    model = piped(1)
    optimizer = adam(model)
    first = Saves(tmp_path)
    first.save(0, model, optimizer)

    def again() -> None:
        Saves(tmp_path).save(1, model, optimizer)

    def second() -> None:
        refusal = r"another job saves into .* give each job a folder of its own"
        with pytest.raises(RuntimeError, match=refusal):
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
        if os.fork() == 0:
            os.close(writing)
            os.read(reading, 1)  # wait until the parent closes its end

    assert forked(leaves_a_process) == 0
    assert forked(again) == 0, "a process that a job has left holds its lock"
    os.close(writing)


def dies_at(operation: int, folder: Path) -> None:
    """Make this process kill itself right before it does a file operation in `folder`.

    `operation` is the number of this file operation, counted from 0.
    """
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
        if not event.startswith(("open", "os.", "shutil.")):
            return
        if given and str(folder) in str(given[0]):
            count(event)

    os.fsync = fsync  # type: ignore[assignment]
    sys.addaudithook(audit)


def a_state_is_whole_or_not_there(tmp_path: Path) -> None:
    """Kill a process before each file operation of a save. Then load, and check the loaded state.

    It must be either the old state or the new one, and it must be complete.
    """
    os.fsync = lambda fd: None  # only matters if the machine crashes
    saved = []
    for seed in (1, 2):
        model = piped(seed)
        optimizer = adam(model)
        trained(model, optimizer, 1, [8])
        saved.append((model, optimizer))
    Saves(tmp_path / "first", keep=1).save(0, *saved[0])
    loaded = piped(3)
    found = set()
    for k in range(1000):
        folder = tmp_path / str(k)
        shutil.copytree(tmp_path / "first", folder)

        def child(k: int = k, folder: Path = folder) -> None:
            dies_at(k, folder)
            Saves(folder, keep=1).save(1, *saved[1])

        ended = forked(child) == 0
        optimizer = adam(loaded)
        state = Saves(folder).load(loaded, optimizer)
        assert state is not None
        step = state["step"]
        expected_model, expected_optimizer = saved[step]
        assert differences(loaded, expected_model) == []
        assert differences(optimizer.state_dict(), expected_optimizer.state_dict()) == []
        found.add((ended, step))
        Saves(folder, keep=1).save(2, loaded, optimizer)
        assert len([*folder.iterdir()]) == 2  # the state and the lock file
        if ended:
            break
    assert found == {(False, 0), (False, 1), (True, 1)}


@pytest.mark.parametrize("run", [a_second_job_is_refused, a_state_is_whole_or_not_there])
def test_in_a_new_process(run: Callable[[Path], None], tmp_path: Path) -> None:
    """Run, in a new process, the tests that fork: a fork is safe only without other threads."""
    process = forking().Process(target=run, args=(tmp_path,))
    process.start()
    process.join(PATIENCE)
    process.kill()
    process.join()
    assert process.exitcode == 0
