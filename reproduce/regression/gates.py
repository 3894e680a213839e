"""Run gates: programs that judge one version of the package without measuring times.

A gate is a Python module that is run as a program. The program imports the package from the first
folder on Python's path, which has the version to judge. Its exit code is the judgement
(`reproduce.error` lists the codes), and its output explains the judgement.
"""

import os
import subprocess
import sys
from typing import Literal, NamedTuple

from reproduce.error import WORSE, Error
from reproduce.machine.description import ROOT
from reproduce.regression.trees import Tree


class Found(NamedTuple):
    """What a gate (a program that judges a version of the package) has found.

    Attributes:
        name: The name of the gate: the last part of its module's name, such as `counts`.
        verdict: "worse", or "~" if nothing is worse than in the old version.
        lines: The lines that the gate has printed.
    """

    name: str
    verdict: Literal["worse", "~"]
    lines: list[str]


def judged_by(module: str, base: Tree, head: Tree) -> Found:
    """Run a gate (a program that judges one version of the package) on the new version, `head`.

    If the gate finds something wrong, it is also run on the old version, `base`. Findings that are
    the same in both versions do not count as worse.

    Args:
        module: The name of the gate's module.
        base: The old version.
        head: The new version.

    Raises:
        Error: The gate cannot judge `head`, for example because the package does not run.
    """
    *_, name = module.split(".")
    code, lines = _run(module, head)
    if code not in (0, WORSE):
        raise Error(lines[-1] if lines else f"{name} ended with exit code {code}")
    if code == 0:
        return Found(name, "~", lines)
    old_code, old_lines = _run(module, base)
    new = [line for line in lines if line not in old_lines]
    if old_code == WORSE and not new:
        return Found(name, "~", [f"what it finds is the same in {base.name}", *lines])
    return Found(name, "worse", lines)


def _run(module: str, tree: Tree) -> tuple[int, list[str]]:
    """Run a gate's module on a version of the package; return its exit code and output lines."""
    path = os.pathsep.join([str(tree.folder), str(ROOT)])
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module],
        cwd=tree.folder,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return ended.returncode, ended.stdout.splitlines()
