"""Ctrl-C while the pipeline runs: each program (interrupted.py) is a process of its own, which is sent signals."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PATIENCE = 300  # seconds; only a hang takes as long
pytestmark = pytest.mark.skipif(os.name != "posix", reason="sends POSIX signals to a process")


def run(*arguments: str) -> tuple[int, list[str], str]:
    """Run a program; return its exit code, its output's lines, and its errors."""
    command = [sys.executable, "-m", "tests.interrupted", *arguments]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=PATIENCE)
    return done.returncode, done.stdout.splitlines(), done.stderr


def test_an_interrupt_from_the_keyboard() -> None:
    places = ["forward", "recompute", "backward"]
    code, printed, errors = run("workers", "until-stopped", "1", *places)

    expected = [[f"running {place}", "interrupted", "trains again"] for place in places]
    assert printed == [line for lines in expected for line in lines], errors
    assert code != 0
    assert errors.count("Traceback") == 1


@pytest.mark.parametrize(("engine", "interrupts"), [("graph", "1"), ("workers", "2")])
def test_an_interrupt_during_a_task_that_does_not_end(engine: str, interrupts: str) -> None:
    """In this thread the first interrupt ends it; where another thread is waited for, the second."""
    code, printed, errors = run(engine, "for-ever", interrupts, "forward")

    assert printed == ["running forward", "interrupted"], errors
    assert code != 0


@pytest.mark.slow
def test_an_interrupt_at_any_moment() -> None:
    code, printed, errors = run()

    assert (code, printed) == (0, ["trains again"]), errors
