"""Copy the torchgpipe of a revision, or of the working tree, into a folder of its own."""

import contextlib
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from reproduce.error import USAGE, Error
from reproduce.machine.description import ROOT
from reproduce.machine.git import commit_of, git

PACKAGE = "torchgpipe"


@dataclass(frozen=True)
class Tree:
    """Hold a folder with a copy of torchgpipe, its name for the user, its commit, and whether it has changes."""

    folder: Path
    name: str
    commit: str | None
    dirty: bool = False


@contextlib.contextmanager
def trees(base: str, head: str | None, root: Path = ROOT) -> Iterator[tuple[Tree, Tree]]:
    """Copy both sides into a temporary folder. It is removed at the end, also if a signal ends this program."""
    with _terminable(), tempfile.TemporaryDirectory(prefix="regression-") as name:
        folder = Path(name)
        old = committed(root, base, folder / "base")
        new = snapshot(root, folder / "head") if head is None else committed(root, head, folder / "head")
        yield old, new


def committed(root: Path, revision: str, folder: Path) -> Tree:
    """Copy torchgpipe of a revision into `folder`.

    Raises:
        Error: there is no git, no such revision, or no torchgpipe in it.
    """
    commit = commit_of(root, revision)
    archive = folder.with_suffix(".zip")
    try:
        git(root, "archive", f"--output={archive}", commit, "--", PACKAGE)
    except Error:
        raise Error(f"{revision}: that revision holds no folder {PACKAGE}", USAGE) from None
    shutil.unpack_archive(archive, folder)
    return Tree(folder, revision, commit)


def snapshot(root: Path, folder: Path) -> Tree:
    """Copy torchgpipe of the working tree as it is, so that edits during the job do not change what is measured."""
    shutil.copytree(root / PACKAGE, folder / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    try:
        commit = commit_of(root, "HEAD")
        dirty = bool(git(root, "status", "--porcelain", "--", PACKAGE))
    except Error:
        return Tree(folder, "the working tree", None)
    return Tree(folder, "the working tree", commit, dirty)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Make SIGTERM (sent by `timeout`) and SIGHUP (sent when the terminal closes) raise `SystemExit`."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    ours = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}  # else `nohup`
    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)
