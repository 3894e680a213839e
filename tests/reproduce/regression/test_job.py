"""The job: its lines by case, and how it says that it broke off."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reproduce.error import Error
from reproduce.regression import job
from reproduce.regression.job import Samples, Settings, collect, interleaved
from reproduce.regression.trees import Tree


def test_lines_become_samples_of_cases() -> None:
    told: list[int] = []
    lines = [
        {"case": "b", "unable": {"base": "ImportError: x"}},
        {"case": "a", "restart": 0, "base": [1.0], "head": [2.0]},
        {"case": "a", "restart": 1, "base": [3.0], "head": [4.0]},
    ]
    found = collect(lines, ["a", "b"], told.append)
    assert found == {
        "a": Samples(base=[[1.0], [3.0]], head=[[2.0], [4.0]]),
        "b": Samples(unable={"base": "ImportError: x"}),
    }
    assert told == [1, 2]


def test_a_job_that_breaks_off_says_why(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "nothing", None)
    lines = interleaved(tree, tree, Settings(["machinery never"]))
    with contextlib.closing(lines), pytest.raises(Error, match=r"exit code 2: .*there is no torchgpipe in"):
        next(lines)


STAND_IN = """
import json, sys
options = dict(part.split("=", 1) for part in sys.argv if part.startswith("--"))
cases = [part.split("=", 1)[1] for part in sys.argv if part.startswith("--case")]
first, restarts = int(options["--first"]), int(options["--restarts"])
if not first and "b" in cases:
    print(json.dumps({"case": "b", "unable": {"base": "gone"}}))
    cases.remove("b")
for i in range(first, first + restarts):
    for case in cases:
        print(json.dumps({"case": case, "restart": i, "base": [1.0], "head": [1.0]}))
"""


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Tree]:
    """Let the job be a script of ours."""

    def be(script: str) -> Tree:
        package = tmp_path / "reproduce" / "regression"
        package.mkdir(parents=True)
        (package.parent / "__init__.py").touch()
        (package / "__init__.py").touch()
        (package / "interleave.py").write_text(script)
        monkeypatch.setattr(job, "ROOT", tmp_path)
        return Tree(tmp_path, "a tree", None)

    return be


@pytest.mark.parametrize("cases", [["a", "b"], ["b"]])
def test_a_new_parent_for_every_few_restarts(cases: list[str], stand_in: Callable[[str], Tree]) -> None:
    """What a side cannot run is told once, and not asked for again."""
    tree = stand_in(STAND_IN)
    lines = list(interleaved(tree, tree, Settings(cases, restarts=12)))
    assert [line["case"] for line in lines if "unable" in line] == ["b"]
    expected = list(range(12)) if "a" in cases else []
    assert [line["restart"] for line in lines if "restart" in line] == expected


@pytest.mark.parametrize(
    ("printed", "shown"),
    [("hello", "'hello'"), ("[1]", "'\\[1\\]'"), ("7", "'7'"), ('{"case": "x"}', '\'{"case": "x"}\'')],
)
def test_what_is_no_sample_is_one_line(printed: str, shown: str, stand_in: Callable[[str], Tree]) -> None:
    tree = stand_in(f"print({printed!r})")
    with pytest.raises(Error, match=f"^the measuring job printed {shown}, which is no sample; torchgpipe must not"):
        list(interleaved(tree, tree, Settings(["a"])))


def test_interrupted_as_it_starts_it_ends(stand_in: Callable[[str], Tree], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C may come when the process is there and nobody knows of it yet."""
    tree = stand_in("import time\ntime.sleep(1000)")
    started = []

    class Interrupted(subprocess.Popen[str]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(job.subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(interleaved(tree, tree, Settings(["a"])))
    assert [process.returncode for process in started] == [-signal.SIGKILL]


def test_when_it_ends_its_forks_are_gone(stand_in: Callable[[str], Tree], tmp_path: Path) -> None:
    tree = stand_in("""
import json, os, sys, time
fork = os.fork()
if not fork:
    time.sleep(1000)
print(json.dumps({"case": "a", "restart": fork, "base": [1.0], "head": [1.0]}), flush=True)
time.sleep(1000)
""")
    with contextlib.closing(interleaved(tree, tree, Settings(["a"]))) as lines:
        fork = Path("/proc", str(next(lines)["restart"]))
        assert fork.exists()
    deadline = time.monotonic() + 300  # it has closed its files, which is a moment before it is gone
    while alive(fork) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(fork)


def alive(process: Path) -> bool:
    try:
        return ") Z " not in (process / "stat").read_text()
    except OSError:
        return False
