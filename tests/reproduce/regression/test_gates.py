"""Tests of the gates of `regression`.

A gate is a program that checks a version of a package without measuring time. For example, a gate
counts operators.
"""

from pathlib import Path
from typing import Any

import pytest

from reproduce.error import Error
from reproduce.machine.description import ROOT
from reproduce.regression import gates
from reproduce.regression.trees import Tree

GATE = """
import sys
from package import lines, code
asked, base = sys.argv[1:]
print("\\n".join(lines).format(asked, open(f"{base}/package.py").readline().strip()))
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("code", "lines", "verdict"),
    [(0, ["all well"], "~"), (1, ["lost", "more lost"], "worse"), (0, ["{0} has {1}"], "~")],
)
def test_a_gate_judges_the_new_version_beside_the_old_one(
    code: int, lines: list[str], verdict: str, tmp_path: Path, monkeypatch: Any
) -> None:
    made = versions((0, ["well"]), (code, lines), tmp_path, monkeypatch)
    found = gates.judged_by("a.gate", *made)
    said = [line.format("--base", "code = 0") for line in lines]
    assert found == ("gate", verdict, said)


def test_a_gate_that_cannot_judge(tmp_path: Path, monkeypatch: Any) -> None:
    """Check the error if a gate (a check of `regression`) cannot run one version of a package."""
    made = versions((0, []), (2, ["", "gate: the package does not run"]), tmp_path, monkeypatch)
    with pytest.raises(Error, match=r"^gate: the package does not run$"):
        gates.judged_by("a.gate", *made)


def test_a_gate_that_crashes_has_found_nothing_worse(tmp_path: Path, monkeypatch: Any) -> None:
    """Check that an exception is no verdict, though Python's exit code is that of "worse", too."""
    crash = ["Traceback (most recent call last):", "ModuleNotFoundError: No module named 'torch'"]
    made = versions((0, []), (1, crash), tmp_path, monkeypatch)
    with pytest.raises(Error, match=r"^ModuleNotFoundError: No module named 'torch'$"):
        gates.judged_by("a.gate", *made)


def test_the_folders_of_pythonpath_are_kept(monkeypatch: Any) -> None:
    monkeypatch.setenv("PYTHONPATH", "/more")
    assert gates.first_on_path(Path("/new")).split(":") == ["/new", str(ROOT), "/more"]


def versions(base: Any, head: Any, folder: Path, monkeypatch: Any) -> tuple[Tree, Tree]:
    """Make two versions of a package, and a fake gate (a program that checks a version).

    Args:
        base: The exit code and the lines of output of the gate for the old version.
        head: The exit code and the lines of output of the gate for the new version.
        folder: The folder in which the versions and the gate are made.
        monkeypatch: The fixture that makes `regression` look for the gate in this folder.
    """
    monkeypatch.setattr(gates, "ROOT", folder)
    (folder / "a").mkdir()
    (folder / "a" / "gate.py").write_text(GATE)
    made = []
    for name, (code, lines) in (("old", base), ("new", head)):
        (folder / name).mkdir()
        text = f"code = {code}\nlines = {lines}\n"
        (folder / name / "package.py").write_text(text)
        made.append(Tree(folder / name, name, None))
    old, new = made
    return old, new
