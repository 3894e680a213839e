"""Find the base: another version of torchgpipe, with which a program compares the current one.

The option `--base` names the base. These programs have the option: the gates `counts` and
`meeting`, which judge a version, and the benchmark `benchmarks.gates.machinery`.
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
from reproduce.regression.gates import first_on_path
from reproduce.regression.trees import TORCHGPIPE, committed
from reproduce.tables.output import Number

VERSION = "torchgpipe/__version__.py"
Base = Path | str
"""A folder with a torchgpipe in it, or a git revision of this repository."""


def add_base(parser: argparse.ArgumentParser, text: str) -> None:
    """Add the option `--base` to a command line. Without the option, its value is None.

    Args:
        parser: The parser of the command line.
        text: The help text, which says what is done with the base.
    """
    parser.add_argument("--base", type=parse_base, metavar="REV|DIR", help=text)


def parse_base(text: str) -> Base:
    """Parse the argument of `--base`, which names another version of torchgpipe.

    Return the absolute path of a folder, or the name of a git revision.

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
def package_folder(base: Base) -> Iterator[Path]:
    """Yield a folder that has only the base's package torchgpipe.

    If the folder were a whole checkout, Python would import the checkout's own gates, and not the
    gates of this program.

    Raises:
        Error: The git revision does not contain torchgpipe.
    """
    with TemporaryDirectory(prefix="base-") as name:
        if isinstance(base, str):
            yield committed(TORCHGPIPE, base, Path(name) / "base").folder
            return
        (Path(name) / "torchgpipe").symlink_to(base / "torchgpipe")
        yield Path(name)


def numbers_of(base: Base, module: str) -> list[Number]:
    """Run a gate (a program that judges a version of the library) on the base.

    Return the numbers that the gate prints as JSON.

    Args:
        base: The other version of the library.
        module: The name of the gate's module.

    Raises:
        Error: The gate cannot judge the base, for example because an old version of the library
            cannot run what the gate runs today; or its output is not JSON.
    """
    with package_folder(base) as folder:
        ended = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", module, "--format", "json"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": first_on_path(folder)},
            capture_output=True,
            text=True,
        )
    if ended.returncode not in (0, WORSE):
        *_, said = ["no reason given", *ended.stderr.splitlines()]
        raise Error(f"the base cannot be judged ({said})")
    try:
        numbers: list[Number] = json.loads(ended.stdout)["numbers"]
    except ValueError:
        raise Error("the base cannot be judged (it prints text of its own)") from None
    return numbers


def version(folder: Path) -> str:
    """Return the version of the torchgpipe in a folder, such as "torchgpipe 0.0.7"."""
    names = runpy.run_path(str(folder / VERSION))
    return f"torchgpipe {names['__version__']}"
