"""Run a gate (a program that judges a version of the library) on another version, the base.

The gate compares its own findings with those of the base.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from reproduce.error import WORSE, Error
from reproduce.machine.description import ROOT
from reproduce.tables.output import Number


def add_base(parser: argparse.ArgumentParser) -> None:
    """Add the option `--base` to the command line of a gate."""
    text = "compare with the version of the library in FOLDER"
    parser.add_argument("--base", type=Path, metavar="FOLDER", help=text)


def found_in(base: Path, module: str) -> list[Number]:
    """Run a gate on the base; return its findings.

    Args:
        base: The folder from which the base's version of the library is imported.
        module: The name of the gate's module.

    Raises:
        Error: The gate cannot judge the base, for example because an old version of the library
            cannot run what the gate runs today.
    """
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, "--format", "json"],
        cwd=base,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(base), str(ROOT)])},
        capture_output=True,
        text=True,
    )
    if ended.returncode not in (0, WORSE):
        *_, said = ["no reason given", *ended.stderr.splitlines()]
        raise Error(f"the base cannot be judged ({said})")
    numbers: list[Number] = json.loads(ended.stdout)["numbers"]
    return numbers
