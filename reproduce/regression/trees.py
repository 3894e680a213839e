"""Put the torchgpipe of a revision, or of the working tree, into a folder of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from reproduce.error import USAGE, Error
from reproduce.machine.description import ROOT
from reproduce.regression.signals import terminable, undivided

__all__ = ["Tree", "checked_out", "commit_of", "snapshot", "trees"]

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
        _git(root, "worktree", "add", "--detach", "--no-checkout", str(folder), commit)
        try:
            _git(folder, "checkout", "--quiet", commit, "--", PACKAGE)
        except Error:
            raise Error(f"{revision}: that revision holds no folder {PACKAGE}", USAGE) from None
        yield Tree(folder, revision, commit)
    finally:
        # Once more forced, as git locks a worktree until it is whole; without its folder, as half of one is refused.
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(Error):
            _git(root, "worktree", "remove", "--force", "--force", str(folder))


def snapshot(root: Path, folder: Path) -> Tree:
    """Copy torchgpipe of the working tree as it is, so that edits during the job do not change what is measured."""
    shutil.copytree(root / PACKAGE, folder / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    try:
        commit = commit_of(root, "HEAD")
        dirty = bool(_git(root, "status", "--porcelain", "--", PACKAGE))
    except Error:
        return Tree(folder, "the working tree", None)
    return Tree(folder, "the working tree", commit, dirty)


def commit_of(root: Path, revision: str) -> str:
    """Return the commit that `revision` names.

    Raises:
        Error: there is no git, or no such revision.
    """
    try:
        _git(root, "rev-parse", "--git-dir")
    except Error as error:
        raise Error(f"{revision}: {root} cannot be used as a git checkout ({error})", USAGE) from None
    try:
        return _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    except Error:
        pass
    if _git(root, "rev-parse", "--is-shallow-repository") == "true":
        raise Error(f"{revision}: this clone is shallow and does not hold it; run 'git fetch --unshallow' first", USAGE)
    raise Error(f"{revision}: no such git revision here; name a commit, a branch or a tag", USAGE)


def _git(folder: Path, *arguments: str) -> str:
    """Run git in a folder, whatever repository a hook or an alias of git, which may run this program, names."""
    elsewhere = _said(["git", "rev-parse", "--local-env-vars"], None).split()
    environment = {name: value for name, value in os.environ.items() if name not in elsewhere}
    return _said(["git", "-C", str(folder), *arguments], environment)


def _said(command: Sequence[str], environment: dict[str, str] | None) -> str:
    """Return what git says. It is out of the reach of Ctrl-C, which is for this program to handle."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, start_new_session=True, env=environment
        )
    except FileNotFoundError:
        raise Error("git is not installed", USAGE) from None
    except (OSError, subprocess.SubprocessError) as error:
        raise Error(f"git failed: {error}", USAGE) from None
    if done.returncode:
        raise Error((done.stderr.strip().splitlines() or [f"git failed: {' '.join(command)}"])[-1], USAGE)
    return done.stdout.strip()
