"""Put the torchgpipe of a revision, or of the working tree, into a folder of its own."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from reproduce.error import USAGE, Error
from reproduce.machine.description import ROOT
from reproduce.machine.git import commit_of, git
from reproduce.regression.signals import terminable, undivided

__all__ = ["Tree", "checked_out", "snapshot", "trees"]

PACKAGE = "torchgpipe"


@dataclass(frozen=True)
class Tree:
    """Hold a folder with a torchgpipe in it: what the user called it, its commit, and whether it differs from that."""

    folder: Path
    name: str
    commit: str | None
    dirty: bool = False


@contextlib.contextmanager
def trees(base: str, head: str | None, root: Path = ROOT) -> Iterator[tuple[Tree, Tree]]:
    """Check both sides out into a temporary folder, which is gone afterwards, also where this program is ended."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(terminable())
        with undivided():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="regression-")))
        old = stack.enter_context(checked_out(root, base, folder / "base"))
        if head is None:
            yield old, snapshot(root, folder / "head")
        else:
            yield old, stack.enter_context(checked_out(root, head, folder / "head"))


@contextlib.contextmanager
def checked_out(root: Path, revision: str, folder: Path) -> Iterator[Tree]:
    """Check torchgpipe of a revision out into `folder`, a git worktree that is there for as long as the context.

    Raises:
        Error: there is no git, no such revision, or no torchgpipe in it.
    """
    commit = commit_of(root, revision)
    try:
        git(root, "worktree", "add", "--detach", "--no-checkout", str(folder), commit)
        try:
            git(folder, "checkout", "--quiet", commit, "--", PACKAGE)
        except Error:
            raise Error(f"{revision}: that revision holds no folder {PACKAGE}", USAGE) from None
        yield Tree(folder, revision, commit)
    finally:
        # Once more forced, as git locks a worktree until it is whole; without its folder, as half of one is refused.
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(Error):
            git(root, "worktree", "remove", "--force", "--force", str(folder))


def snapshot(root: Path, folder: Path) -> Tree:
    """Copy torchgpipe of the working tree as it is, so that edits during the job do not change what is measured."""
    shutil.copytree(root / PACKAGE, folder / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    try:
        commit = commit_of(root, "HEAD")
        dirty = bool(git(root, "status", "--porcelain", "--", PACKAGE))
    except Error:
        return Tree(folder, "the working tree", None)
    return Tree(folder, "the working tree", commit, dirty)
