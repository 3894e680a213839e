"""Tests of the frame of `python -m benchmarks.gpu`, mostly with parts that are made up.

What a part has found is kept, however the part or the command ends, and the page says it.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import tarfile
import time
from collections.abc import Callable, Sequence
from multiprocessing import active_children
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.gpu import __main__ as program
from benchmarks.gpu.frame import command, family
from benchmarks.gpu.frame.command import ARCHIVE, PAGE, Plan, main, page_of, run_parts
from benchmarks.gpu.frame.page import ABOUT, OUTCOME, page
from benchmarks.gpu.frame.processes import Outcome
from benchmarks.gpu.part import MOST_LINES, PARTS, RESULT, Context, Fields, Part, load_parts
from reproduce.error import Error, interruptible
from reproduce.machine.clocks import GpuState
from reproduce.records.record import load

Run = Callable[[Context], Fields]


class Fake:
    """A part that runs a function. The page shows its result as it is."""

    PURPOSE = "a question"

    def __init__(self, run: Run, share: float = 20.0, needs: Sequence[str] = ()) -> None:
        self.run = run
        self.SHARE = share
        self.NEEDS = needs

    def lines(self, result: Fields) -> list[str]:
        return [f"{name} is {value}" for name, value in result.items()]


def answers(context: Context) -> Fields:
    context.write({"answer": 41})
    return {"answer": 42}


def keeps(context: Context) -> Fields:
    context.save(context.new_record("answers", {}, []))
    return {}


def breaks_off(context: Context) -> Fields:
    keeps(context)
    raise ValueError("no luck")


def fails(context: Context) -> Fields:
    context.write({"before": 1})
    print("soon it fails")
    raise ValueError("no luck\nat all")


def dies(context: Context) -> Fields:
    context.write({"before": 2})
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def hangs(context: Context) -> Fields:
    """Start processes in sessions of their own, one after another, and wait for ever."""
    started = []
    while True:
        if len(started) < 50:
            sleep = ["sleep", "100"]
            sleeper = subprocess.Popen(sleep, cwd=context.folder, start_new_session=True)
            started.append(sleeper)
            context.write({"sleepers": len(started)})
        time.sleep(0.05)


def interrupts(context: Context) -> Fields:
    context.write({"before": 3})
    os.kill(os.getppid(), signal.SIGTERM)
    return hangs(context)


@pytest.fixture
def slow_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the list of processes old when it arrives: a part starts others in the meantime."""

    def listed_late() -> dict[int, tuple[int, int]]:
        found = listed()
        time.sleep(0.2)
        return found

    listed = family._processes
    monkeypatch.setattr(family, "_processes", listed_late)


def outcome(folder: Path, name: str) -> Outcome:
    return msgspec.json.decode((folder / name / OUTCOME).read_bytes(), type=Outcome)


def result(folder: Path, name: str) -> Any:
    return json.loads((folder / name / RESULT).read_text())


def alive_in(folder: Path) -> list[str]:
    """Return the commands of all processes that have a folder as their working directory."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or it is another user's
            if (process / "cwd").readlink() == folder:
                found.append((process / "cmdline").read_text())
    return found


@pytest.mark.usefixtures("slow_list")
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
    assert result(tmp_path, "hangs")["sleepers"] > 0
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
    assert 'test_frame.py", line' in said
    assert "in hangs\n  - sleepers is" in said
    assert re.search(r"\(finished, \d+ s\): a question\n  - answer is 42\n", said)
    assert "answers: finished" in capsys.readouterr().out


def test_records_say_whether_their_part_was_finished(tmp_path: Path) -> None:
    parts: dict[str, Part] = {"keeps": Fake(keeps), "breaks-off": Fake(breaks_off)}

    run_parts(parts, Plan(tmp_path, 600.0, "tiny"))

    for name, state in (("keeps", "finished"), ("breaks-off", "interrupted")):
        run = load(tmp_path / "records" / f"gpu-{name}.json").run
        assert run is not None
        assert run.state == state
        assert run.ended is not None


def test_what_there_was_no_time_for_is_named(tmp_path: Path) -> None:
    parts: dict[str, Part] = {"answers": Fake(answers)}

    good = run_parts(parts, Plan(tmp_path, 1.0, "tiny"))

    assert good
    assert outcome(tmp_path, "answers").ended == "no time"
    said = (tmp_path / PAGE).read_text()
    assert "- **answers** (no time): a question; 1 s were left for it\n" in said


def test_a_part_passes_on_the_time_that_it_did_not_need(tmp_path: Path) -> None:
    def tell(context: Context) -> Fields:
        return {"left": context.seconds_left()}

    parts: dict[str, Part] = {"first": Fake(tell, 1.0), "second": Fake(tell, 3.0)}

    run_parts(parts, Plan(tmp_path, 4000.0, "paper"))

    # A part has to be ready five seconds before it is killed.
    assert 900 < result(tmp_path, "first")["left"] < 995
    assert 3900 < result(tmp_path, "second")["left"] < 3995


@pytest.mark.usefixtures("slow_list")
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

    started = ForkProcess.start
    monkeypatch.setattr(ForkProcess, "start", start)

    with interruptible(), pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        run_parts({"hangs": Fake(hangs)}, Plan(tmp_path, 600.0, "tiny"))

    left = active_children()
    for child in left:
        child.kill()
    assert left == []
    assert outcome(tmp_path, "hangs").ended == "interrupted"


def written(folder: Path, name: str, outcome: Outcome, result: Fields) -> None:
    (folder / name).mkdir()
    (folder / name / OUTCOME).write_bytes(msgspec.json.encode(outcome))
    (folder / name / RESULT).write_text(json.dumps(result))


def test_the_page_has_at_most_40_lines(tmp_path: Path) -> None:
    parts: dict[str, Part] = {name: Fake(answers) for name in PARTS}
    for name in PARTS:
        found = {f"value {k}": f"{k}\n" for k in range(2 * MOST_LINES)}
        written(tmp_path, name, Outcome("finished", 3.0), found)
    about = {"started": "2020-04-21T10:02:05Z", "seconds": 480.0, "size": "paper"}
    about |= {"against": "torchgpipe 0.0.7", "parts": list(PARTS), "gpus": []}
    (tmp_path / ABOUT).write_text(json.dumps(about))

    said = page(tmp_path, parts)

    assert len(said.splitlines()) == 40
    assert "beside torchgpipe 0.0.7" in said
    assert f"  - value 1 is 1\n  - more is in machine/{RESULT}\n" in said


def test_the_page_says_how_the_gpus_were_clocked(tmp_path: Path) -> None:
    parts: dict[str, Part] = {"first": Fake(answers), "second": Fake(answers)}
    hot = GpuState(0, 1400.0, temperature=83.0, slowed_by=["software power cap"])
    written(tmp_path, "first", Outcome("finished", 3.0, gpus=[hot]), {})
    written(tmp_path, "second", Outcome("finished", 3.0, gpus=[GpuState(0, 1980.0)]), {})
    about = {"started": "2020-04-21T10:02:05Z", "seconds": 480.0, "size": "paper"}
    before = [{"index": 0, "clock": 345.0, "temperature": 31.0}]
    about |= {"against": None, "parts": list(parts), "gpus": before}
    (tmp_path / ABOUT).write_text(json.dumps(about))

    said = page(tmp_path, parts)

    assert "at 345 MHz and 31 °C before and at 1980 MHz and ? °C after" in said
    assert "slowed by software power cap after first.\n" in said


def test_a_result_without_what_its_lines_need(tmp_path: Path) -> None:
    class Strict(Fake):
        def lines(self, result: Fields) -> list[str]:
            return [str(result["missing"])]

    run_parts({"strict": Strict(answers)}, Plan(tmp_path, 60.0, "tiny"))

    said = (tmp_path / PAGE).read_text()
    assert f"  - strict/{RESULT} cannot be shown in words (KeyError: 'missing')\n" in said


def test_a_part_that_cannot_be_imported(tmp_path: Path) -> None:
    parts = load_parts(["nothing_of_this_name"])

    assert not run_parts(parts, Plan(tmp_path, 60.0, "tiny"))

    reason = outcome(tmp_path, "nothing_of_this_name").reason
    assert reason == "ModuleNotFoundError: No module named 'benchmarks.gpu.nothing_of_this_name'"


def test_the_page_is_made_anew_from_the_results_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--dry-run", "--only", "machine", "--out", str(tmp_path)])

    said = (tmp_path / PAGE).read_text()
    assert "- **machine** (finished" in said
    assert "within cpu" in said
    assert capsys.readouterr().out.endswith(said)
    for place in (tmp_path, tmp_path / ARCHIVE):
        main(["--page", str(place)])
        assert capsys.readouterr().out == said


def test_results_are_not_mixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="2"):
        main(["--dry-run", "--out", str(tmp_path)])
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith("there are files already; name an empty or new folder")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--minutes 0 --dry-run", "0 is not a number of minutes above 0"),
        ("--against /nowhere", "there is no torchgpipe/__version__.py in /nowhere (try: pip "),
        ("--only everything", "invalid choice: 'everything'"),
    ],
)
def test_what_it_refuses(options: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(options.split())
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        main(["--out", "anywhere"])
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith("there is no CUDA device here; --dry-run tries the parts on the CPU")


def test_results_need_a_folder(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(SystemExit, match="2"):
        main([])
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith("--out DIR is missing: name a folder for the results")


def test_a_page_of_nothing(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("no archive")
    with pytest.raises(Error, match=r"^--page .*file: not an archive of this command \("):
        page_of(file)
    with pytest.raises(Error, match=rf"^--page .*: there is no {ABOUT} in it; name the DIR"):
        page_of(tmp_path)


def test_missing_packages_are_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "NEEDED", ("torch", "no_such_package", "nor_this"))
    said = r"^python -m benchmarks.gpu: not installed: no_such_package nor_this \(pip install no_"
    with pytest.raises(SystemExit, match=said):
        program.main()
