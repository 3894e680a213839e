"""Run git, and say what is checked out."""

import hashlib
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from reproduce.error import Error
from reproduce.machine.description import ROOT


class Git(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Name the source: `dirty` when a tracked file differed from the revision. `changes` tells how: equal, if equal."""

    revision: str
    dirty: bool
    changes: str | None = None  # not known of older runs

    def name(self, digits: int, sign: str = "+") -> str:
        """Return so many digits of the revision, and if it had changes the sign and what tells them apart."""
        return self.revision[:digits] + f"{sign}{self.changes or ''}".rstrip() * self.dirty


def checkout(folder: Path = ROOT) -> Git | None:
    """Return the revision checked out in `folder`; None if it is not the top folder of a checkout, or without git."""
    try:
        if git(
            folder, "rev-parse", "--show-prefix"
        ):  # another project's checkout, which has this one installed
            return None
        revision = git(folder, "rev-parse", "--verify", "HEAD").decode()
        diff = git(
            folder, "diff", "HEAD", "--binary", "--no-ext-diff", "--no-textconv", "--no-color"
        )
        return Git(revision, bool(diff), hashlib.sha256(diff).hexdigest()[:8] if diff else None)
    except Error:
        return None


def commit_of(folder: Path, revision: str) -> str:
    """Return the commit that `revision` names in the repository of `folder`, or raise `Error` if there is none."""
    try:
        git(folder, "rev-parse", "--git-dir")
    except Error as error:
        raise Error(f"{revision}: {folder} cannot be used as a git checkout ({error})") from None
    try:
        return git(
            folder, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}"
        ).decode()
    except Error:
        pass
    if git(folder, "rev-parse", "--is-shallow-repository") == b"true":
        raise Error(
            f"{revision}: this clone is shallow and does not hold it; run 'git fetch --unshallow' first"
        )
    raise Error(f"{revision}: no such git revision here; name a commit, a branch or a tag")


def commit_file(folder: Path, branch: str, name: str, change: Callable[[bytes], bytes]) -> None:
    """Commit a changed or new file to a branch, which may be new, or raise `Error`. Index and files stay."""
    ref = f"refs/heads/{git(folder, 'check-ref-format', '--branch', branch).decode()}"
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise Error(f"{name}: on a branch, give a path within the repository")
    if f"branch {ref}" in git(folder, "worktree", "list", "--porcelain").decode().splitlines():
        raise Error(
            f"{branch} is checked out, and is not to change behind its files: name another branch"
        )
    old = git(folder, "for-each-ref", "--format=%(objectname)", ref).decode()
    there = old and git(folder, "ls-tree", old, "--", name)
    content = change(git(folder, "cat-file", "blob", f"{old}:{name}") if there else b"")
    start = f"from {old}\n" if old else ""  # git refuses it if the branch has moved on
    commit = (
        f"commit {ref}\ncommitter reproduce <reproduce@localhost> now\ndata <<.\n{name}\n.\n{start}"
    )
    given = f"{commit}M 100644 inline {name}\ndata {len(content)}\n".encode() + content
    git(folder, "fast-import", "--quiet", "--date-format=now", given=given)


def git(folder: Path, *arguments: str, given: bytes | None = None) -> bytes:
    """Run git in `folder`, with `given` as its input, and return what it prints, without white space around it.

    Variables such as GIT_DIR are not passed on: if a git hook or alias started this program, they name its repository.
    If git is not there, or fails, it raises `Error` with the last line that git printed.
    """
    env = {
        name: value for name, value in os.environ.items() if not re.match("GIT_(?!CONFIG_)", name)
    }
    command = ["git", "-C", str(folder), *arguments]
    try:
        # A new session keeps Ctrl-C away from git: only this program handles it.
        done = subprocess.run(
            command, input=given, capture_output=True, timeout=120, start_new_session=True, env=env
        )
    except FileNotFoundError:
        raise Error("git is not installed") from None
    except (OSError, subprocess.SubprocessError) as error:
        raise Error(f"git failed: {error}") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise Error(lines[-1] if lines else f"git failed: {' '.join(command)}")
    return done.stdout.strip()
