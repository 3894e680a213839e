"""The job: what each side is asked, a new parent now and then, and how it ends."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from reproduce.error import Error
from reproduce.machine.description import ROOT
from reproduce.regression import job
from reproduce.regression.job import Settings, interleaved
from reproduce.regression.trees import Tree

HERE, OTHER = Tree(ROOT, "here", None), Tree(ROOT / "other", "other", None)


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
        del job["cases"]["b"]
for i in range(job["first"], job["first"] + job["restarts"]):
    for case in job["cases"]:
        print(json.dumps({"case": case, "restart": i, "parent": os.getpid(), "job": job}))
""")
    settings = Settings(cases, restarts=12, rounds=3, clock="wall", slow_down=0.5, seed=4)
    lines = list(interleaved(OTHER, HERE, settings))
    assert [line["case"] for line in lines if "unable" in line] == ["b"]
    samples = [line for line in lines if "restart" in line]
    assert [line["restart"] for line in samples] == (list(range(12)) if "a" in cases else [])
    assert len({line["parent"] for line in samples}) == (2 if "a" in cases else 0)
    for line in samples:
        assert line["job"]["folders"] == [str(OTHER.folder), str(HERE.folder)]
        assert line["job"]["cases"] == {"a": {"base": [0, ["a", "wall", 0.0]], "head": [1, ["a", "wall", 0.5]]}}
        assert (line["job"]["rounds"], line["job"]["seed"], line["job"]["one_core"]) == (3, 4, False)


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
