"""Run the command `regression` with real measurements, in a copy of this repository."""

import shlex
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reproduce.machine.description import ROOT

from ..made import commit

MINE = """
from reproduce.regression.timed import Case

def prepare():
    import mine
    return lambda: sum(range(mine.prepare.__code__.co_firstlineno))

CASES = [Case("machinery never", prepare)]
"""
FOREIGN = "--package mine --cases mine.txt --build 'mkdir src; cp mine.txt src/mine.py'"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "ends", "code", "said"),
    [
        ("--base HEAD --also HEAD~1 --restarts 9 --rounds 1", None, 0, "reproduce: "),
        ("--base HEAD --restarts 100000", signal.SIGTERM, 143, "reproduce: ended by SIGTERM\n"),
        ("--bisect HEAD~1 HEAD --restarts 100000", signal.SIGINT, 130, "reproduce: interrupted\n"),
        (f"--base HEAD --restarts 8 --rounds 1 {FOREIGN}", None, 0, "reproduce: "),
    ],
)
def test_for_real(
    asked: str,
    ends: signal.Signals | None,
    code: int,
    said: str,
    start: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """Run `regression` in a repository with two commits and an uncommitted edit.

    The command must leave no temporary files, even if a signal ends it.
    """
    root, copies = tmp_path / "repository", tmp_path / "tmp"
    copies.mkdir()
    ignore = shutil.ignore_patterns("__pycache__")
    for package in ("reproduce", "torchgpipe"):
        shutil.copytree(ROOT / package, root / package, ignore=ignore)
    (root / "mine.txt").write_text(MINE)
    for tag in ("1", "2", ""):
        with (root / "torchgpipe" / "__init__.py").open("a") as file:
            file.write("# changed\n")
        if tag:
            commit(root, tag)
    # No difference exceeds this threshold, so the machine's noise cannot make the test fail.
    wide = ["--threshold", "1000", "--also-threshold", "1000"]
    options = ["--case", "machinery never", *wide, *shlex.split(asked)]

    process = start("-m", "reproduce", "regression", *options, root=root, TMPDIR=str(copies))
    if ends is not None:
        assert process.stderr.readline(), "a restart is done"
        process.send_signal(ends)
    out, err = process.communicate()  # waits for all processes that write to stderr, and children

    assert process.returncode == code, err
    assert "Traceback" not in err, err
    if ends is None:
        assert said not in err
        assert "B: the working tree (" in out
    else:
        assert err.endswith(said)
        assert not out
    assert not list(copies.glob("regression-*"))
