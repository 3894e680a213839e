"""The job: which torchgpipe each side runs, a new parent now and then, and how it ends."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from reproduce.error import Error
from reproduce.machine.description import ROOT
from reproduce.regression import job
from reproduce.regression.cases import MACHINERY
from reproduce.regression.job import Settings, interleaved
from reproduce.regression.trees import Tree

NAME = MACHINERY[0].name
HERE = Tree(ROOT, "here", None)


@pytest.mark.slow
def test_for_real_each_side_runs_the_torchgpipe_that_it_was_given(tmp_path: Path) -> None:
    """A base from before there was a GPipe, which prints, beside this one."""
    package = tmp_path / "torchgpipe"
    package.mkdir()
    (package / "__init__.py").write_text("print('hello')\n")
    (line,) = interleaved(Tree(tmp_path, "old", None), HERE, Settings([NAME], restarts=2, rounds=1))
    assert line["case"] == NAME and list(line["unable"]) == ["base"]
    assert line["unable"]["base"].startswith("ImportError: cannot import name 'GPipe' from 'torchgpipe'")


@pytest.mark.slow
def test_real_samples() -> None:
    lines = list(interleaved(HERE, HERE, Settings([NAME], restarts=2, rounds=3)))
    assert [line["restart"] for line in lines] == [0, 1]
    for line in lines:
        assert len(line["base"]) == len(line["head"]) == 3 and min(line["base"] + line["head"]) > 0


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Let the measuring program be a script of ours, which finds what it is to do in `job`."""

    def be(script: str) -> None:
        package = tmp_path / "reproduce" / "regression"
        package.mkdir(parents=True)
        for folder in (package.parent, package):
            (folder / "__init__.py").touch()
        (package / "interleave.py").write_text(f"import json, os, sys, time\njob = json.loads(sys.argv[1])\n{script}")
        monkeypatch.setattr(job, "ROOT", tmp_path)

    return be


@pytest.mark.parametrize("cases", [["a", "b"], ["b"]])
def test_a_new_parent_for_every_few_restarts(cases: list[str], stand_in: Callable[[str], None]) -> None:
    """What a side cannot run is told once, and not asked for again."""
    stand_in("""
for case in list(job["cases"]):
    if case == "b":
        print(json.dumps({"case": "b", "unable": {"base": "gone"}}))
        job["cases"].remove("b")
for i in range(job["first"], job["first"] + job["restarts"]):
    for case in job["cases"]:
        print(json.dumps({"case": case, "restart": i, "parent": os.getpid()}))
""")
    lines = list(interleaved(HERE, HERE, Settings(cases, restarts=12)))
    assert [line["case"] for line in lines if "unable" in line] == ["b"]
    assert [line["restart"] for line in lines if "restart" in line] == (list(range(12)) if "a" in cases else [])
    assert len({line["parent"] for line in lines if "restart" in line}) == (2 if "a" in cases else 0)


def test_a_job_that_breaks_off_says_why(stand_in: Callable[[str], None]) -> None:
    stand_in("print(json.dumps({'case': 'a'}), flush=True)\nsys.exit('too bad\\nit broke')")
    lines = interleaved(HERE, HERE, Settings(["a"]))
    assert next(lines) == {"case": "a"}
    with pytest.raises(Error, match=r"^the measuring job ended with exit code 1: it broke$"):
        next(lines)


def test_when_it_ends_its_forks_are_gone(stand_in: Callable[[str], None]) -> None:
    stand_in("""
fork = os.fork()
if fork:
    print(json.dumps({"case": "a", "restart": fork}), flush=True)
time.sleep(1000)
""")
    with contextlib.closing(interleaved(HERE, HERE, Settings(["a"]))) as lines:
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
