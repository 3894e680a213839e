"""Run gates: programs that judge a version of the package, without measuring times.

A gate is a Python module that is run as a program. The program imports the package from the first
folder on Python's path, which has the version to judge. The gate's option `--base` names the folder
of an older version, and the gate compares the two versions. Its exit code is the judgement
(`reproduce.error` lists the codes), and its output explains the judgement.
"""

import os
import subprocess
import sys
from pathlib import Path
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


def first_on_path(folder: Path) -> str:
    """Return a PYTHONPATH with which Python imports the package from `folder`.

    After this folder come this checkout, which has the gates, and the folders of PYTHONPATH, which
    may have other packages.
    """
    folders = [str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.pathsep.join(folders)


def judged_by(module: str, base: Tree, head: Tree) -> Found:
    """Run a gate (a program that judges one version of the package) on the new version, `head`.

    A fault that the old version, `base`, has, too, does not count.

    Args:
        module: The name of the gate's module.
        base: The old version.
        head: The new version.

    Raises:
        Error: The gate cannot judge `head`, for example because the package does not run.
    """
    *_, name = module.split(".")
    path = first_on_path(head.folder)
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, "--base", str(base.folder)],
        cwd=head.folder,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = ended.stdout.splitlines()
    # Python's exit code after an exception is the same as that of "worse".
    crashed = ended.returncode == WORSE and any(line.startswith("Traceback ") for line in lines)
    if crashed or ended.returncode not in (0, WORSE):
        raise Error(lines[-1] if lines else f"{name} ended with exit code {ended.returncode}")
    return Found(name, "worse" if ended.returncode else "~", lines)
