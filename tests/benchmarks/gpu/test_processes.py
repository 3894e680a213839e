"""Tests of the processes in which `python -m benchmarks.gpu` runs its parts (measurements).

However a part or the command ends, the results so far are kept, and no process is left running.
"""

import contextlib
import os
import re
import signal
import subprocess
import tarfile
import time
from multiprocessing import active_children
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest

from benchmarks.gpu.frame import command, family, processes, watch
from benchmarks.gpu.frame.command import ARCHIVE, PAGE, Plan, main, run_parts
from benchmarks.gpu.part import RESULT, Context, Fields, Part
from reproduce.error import interruptible
from reproduce.machine.clocks import GpuState

from .fakes import Fake, answers, outcome, result


def fails(context: Context) -> Fields:
    context.write({"before": 1})
    print("soon it fails")
    raise ValueError("no luck\nat all")


def dies(context: Context) -> Fields:
    context.write({"before": 2})
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def hangs(context: Context) -> Fields:
    """Start another process, which does not end by itself, and wait for ever."""
    subprocess.Popen(["sleep", "100"], cwd=context.folder, start_new_session=True)
    context.write({"has started": "a process"})
    while True:
        time.sleep(0.01)


def interrupts(context: Context) -> Fields:
    """Interrupt `python -m benchmarks.gpu`, and start a process that its list of processes lacks.

    After an interrupt, the command lists its processes to end them. As soon as the list is made,
    this function starts one more process. The command must end this process, too.
    """
    context.write({"before": 3})
    os.kill(os.getppid(), signal.SIGTERM)
    while not (context.folder / LISTED).exists():
        time.sleep(0.01)
    return hangs(context)


LISTED = "listed"


@pytest.fixture
def outdated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the command's first list of processes outdated, to test that it lists them again.

    The list is returned only after another process, which is not in it, has started.
    """

    def listed() -> dict[int, tuple[int, int]]:
        found = listing()
        folder = tmp_path / "interrupts"
        if not (folder / LISTED).exists():
            (folder / LISTED).touch()
            until = time.monotonic() + 0.5
            while not alive_in(folder) and time.monotonic() < until:
                time.sleep(0.01)
        return found

    listing = family._processes
    monkeypatch.setattr(family, "_processes", listed)


def alive_in(folder: Path) -> list[str]:
    """Return the commands of all processes whose working directory is the given folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or it is another user's
            if (process / "cwd").readlink() == folder:
                found.append((process / "cmdline").read_text())
    return found


def test_a_failure_is_a_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "LEAST_SECONDS", 0.1)
    parts: dict[str, Part] = {
        "fails": Fake(fails),
        "dies": Fake(dies),
        "needs": Fake(answers, needs=["no_such_package"]),
        "hangs": Fake(hangs, share=0.5),
        "answers": Fake(answers),
    }

    good = run_parts(parts, Plan(tmp_path, 60.0, "paper"))

    assert not good
    ended = {name: outcome(tmp_path, name).ended for name in parts}
    assert ended == {
        "fails": "failed",
        "dies": "killed",
        "needs": "not run",
        "hangs": "killed",
        "answers": "finished",
    }
    assert result(tmp_path, "fails") == {"before": 1}
    assert result(tmp_path, "dies") == {"before": 2}
    assert result(tmp_path, "answers") == {"answer": 42}
    assert result(tmp_path, "hangs") == {"has started": "a process"}
    assert alive_in(tmp_path / "hangs") == []
    log = (tmp_path / "fails" / "log.txt").read_text()
    assert log.startswith("soon it fails\n")

    said = (tmp_path / PAGE).read_text()
    assert re.search(
        r"- \*\*fails\*\* \(failed, \d+ s\): a question; ValueError: no luck\n  - before is 1\n",
        said,
    )
    assert "it ended by SIGKILL\n  - before is 2\n" in said
    assert "; not installed: no_such_package (pip install no_such_package)\n" in said
    assert re.search(r'and was at File ".*", line \d+ in \w+\n  - has started is', said)
    assert re.search(r"\(finished, \d+ s\): a question\n  - answer is 42\n", said)
    assert "answers: finished" in capsys.readouterr().out


@pytest.mark.usefixtures("outdated")
def test_a_signal_ends_the_part_and_keeps_what_it_found(tmp_path: Path) -> None:
    parts: dict[str, Part] = {"interrupts": Fake(interrupts), "answers": Fake(answers)}

    with interruptible(), pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        run_parts(parts, Plan(tmp_path, 600.0, "tiny"))

    assert outcome(tmp_path, "interrupts").ended == "interrupted"
    assert not (tmp_path / "answers").exists()
    with tarfile.open(tmp_path / ARCHIVE) as archive:
        names = archive.getnames()
    assert f"gpu/interrupts/{RESULT}" in names
    assert f"gpu/{ARCHIVE}" not in names
    said = (tmp_path / PAGE).read_text()
    assert "- **interrupts** (interrupted): a question\n" in said
    assert "- **answers** (not reached): a question\n" in said
    assert alive_in(tmp_path / "interrupts") == []


def test_a_signal_right_after_the_start_ends_the_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(process: ForkProcess) -> None:
        started(process)
        os.kill(os.getpid(), signal.SIGTERM)

    others = active_children()  # such as ranks of other tests
    started = ForkProcess.start
    monkeypatch.setattr(ForkProcess, "start", start)

    with interruptible(), pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        run_parts({"hangs": Fake(hangs)}, Plan(tmp_path, 600.0, "tiny"))

    left = [child for child in active_children() if child not in others]
    for child in left:
        child.kill()
    assert left == []
    assert outcome(tmp_path, "hangs").ended == "interrupted"


def test_what_slows_a_gpu_in_the_middle_of_a_part_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle = GpuState(0, 345.0, temperature=31.0, idle=True, slowed_by=[])
    slow = GpuState(0, 1400.0, temperature=83.0, idle=False, slowed_by=["hardware slowdown"])
    fast = GpuState(0, 1980.0, temperature=70.0, idle=False, slowed_by=[])
    out = tmp_path / "out"
    out.mkdir()
    states = [idle, idle, slow, fast]  # the first one is seen before all parts
    looks: list[GpuState] = []

    def look() -> list[GpuState]:
        looks.append(states[min(len(looks), 3)])
        (tmp_path / "looks").write_text(f"{len(looks)}")
        return looks[-1:]

    def runs_until_three_looks(context: Context) -> Fields:
        while int((tmp_path / "looks").read_text() or "0") < 4:
            time.sleep(0.01)
        return {}

    monkeypatch.setattr(command, "gpu_states", look)
    monkeypatch.setattr(watch, "gpu_states", look)
    monkeypatch.setattr(processes, "PERIOD", 0.01)

    run_parts({"runs": Fake(runs_until_three_looks)}, Plan(out, 600.0, "tiny"))

    (found,) = outcome(out, "runs").gpus
    assert found.looks == found.busy + 1
    assert found.clock == (1400.0, 1980.0)
    assert found.temperature == 83.0
    assert found.slowed_by == {"hardware slowdown": 1}


def test_this_process_does_not_ask_cuda_how_many_gpus_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the command never asks CUDA how many GPUs there are.

    If it did, its parts could not use CUDA, because they are forks of this process.
    """

    def count() -> int:
        asked.append(os.getpid())
        return 3

    asked: list[int] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: count() > 0)
    monkeypatch.setattr("torch.cuda.device_count", count)

    def tell(context: Context) -> Fields:
        return {"devices": list(map(str, context.devices)), "asked": len(asked)}

    monkeypatch.setattr(command, "load_parts", lambda names: {"tells": Fake(tell)})

    main(["--out", str(tmp_path)])

    told = result(tmp_path, "tells")
    assert told == {"devices": ["cuda:0", "cuda:1", "cuda:2"], "asked": 0}
    assert asked == []
