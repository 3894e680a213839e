"""Tests of the command `init-ci`, which writes a CI workflow that runs `regression`."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from reproduce.cli.init_ci import WORKFLOW
from reproduce.machine.description import ROOT


def test_the_workflow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: Any) -> None:
    """`init-ci` writes the CI workflow of this repository, and a workflow for another package."""
    own = (ROOT / WORKFLOW).read_text()
    first, *_ = own.splitlines()
    asked = shlex.split(first.removeprefix("# Written by: reproduce "))
    monkeypatch.setattr("sys.argv", ["reproduce", *asked])
    monkeypatch.chdir(tmp_path)

    command(*asked)

    assert WORKFLOW.read_text() == own
    assert "Check before" in own
    _, err = command(*asked, code=2)
    assert "exists already: change it by hand" in err

    WORKFLOW.unlink()
    Path("cases.py").touch()
    command("init-ci", "--package", "mine", "--cases", "cases.py", "--build", "make it")

    text = WORKFLOW.read_text()
    assert "regression.md --package mine --cases cases.py --build 'make it'\n" in text
    assert "Check before" not in text
