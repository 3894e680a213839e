"""Find another version of torchgpipe, the base, with which a program compares the version here.

The user names the base by the option `--base`. The programs are gates (programs that judge a
version) and the benchmark of the pipeline's machinery.
"""

import argparse
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from reproduce.error import WORSE, Error
from reproduce.machine.description import ROOT
from reproduce.machine.git import commit_of
from reproduce.regression.trees import TORCHGPIPE, committed
from reproduce.tables.output import Number

VERSION = "torchgpipe/__version__.py"
Base = Path | str
"""A folder with a torchgpipe in it, or a git revision of this repository."""


def add_base(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the option `--base` to a command line.

    Args:
        parser: The parser of the command line.
        what: The help text: what is done with the base.
    """
    parser.add_argument("--base", type=other_torchgpipe, metavar="REV|DIR", help=what)


def other_torchgpipe(text: str) -> Base:
    """Parse the argument of `--base`, which names another version of torchgpipe.

    Raises:
        argparse.ArgumentTypeError: If the argument is neither a folder with a torchgpipe in it nor
            a git revision.
    """
    if (Path(text) / VERSION).is_file():
        return Path(text).absolute()
    try:
        commit_of(ROOT, text)
    except Error as error:
        install = f"pip install --no-deps --target {text} torchgpipe==0.0.7"
        advice = f"or a folder with a torchgpipe in it ({install})"
        raise argparse.ArgumentTypeError(f"{error}, {advice}") from None
    return text


@contextmanager
def folder_of(base: Base) -> Iterator[Path]:
    """Yield a folder that has only the base's package torchgpipe.

    It must have nothing else, because a checkout also has its own gates, which would judge it.
    """
    with TemporaryDirectory(prefix="base-") as name:
        if isinstance(base, str):
            yield committed(TORCHGPIPE, base, Path(name) / "base").folder
            return
        (Path(name) / "torchgpipe").symlink_to(base / "torchgpipe")
        yield Path(name)


def found_in(base: Base, module: str) -> list[Number]:
    """Run a gate (a program that judges a version of the library) on the base; return its findings.

    Args:
        base: The other version of the library.
        module: The name of the gate's module.

    Raises:
        Error: The gate cannot judge the base, for example because an old version of the library
            cannot run what the gate runs today.
    """
    with folder_of(base) as folder:
        ended = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", module, "--format", "json"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])},
            capture_output=True,
            text=True,
        )
    if ended.returncode not in (0, WORSE):
        *_, said = ["no reason given", *ended.stderr.splitlines()]
        raise Error(f"the base cannot be judged ({said})")
    try:
        numbers: list[Number] = json.loads(ended.stdout)["numbers"]
    except ValueError:
        raise Error("the base cannot be judged (it prints something of its own)") from None
    return numbers


def version(folder: Path) -> str:
    """Return the version of the torchgpipe in a folder, such as "torchgpipe 0.0.7"."""
    names = runpy.run_path(str(folder / VERSION))
    return f"torchgpipe {names['__version__']}"
