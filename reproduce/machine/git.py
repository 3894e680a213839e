"""Run git, and say what is checked out."""

import os
import re
import subprocess
from pathlib import Path

from msgspec import Struct

from reproduce.error import USAGE, Error
from reproduce.machine.description import ROOT


class Git(Struct, frozen=True, forbid_unknown_fields=True):
    """Name the source: `dirty` when a tracked file differed from the revision."""

    revision: str
    dirty: bool


def checkout(folder: Path = ROOT) -> Git | None:
    """Return the revision checked out in `folder`; None if it is not the top folder of a checkout, or without git."""
    try:
        if git(folder, "rev-parse", "--show-prefix"):  # another project's checkout, which has this one installed
            return None
        changes = git(folder, "status", "--porcelain", "--untracked-files=no")
        return Git(git(folder, "rev-parse", "--verify", "HEAD").decode(), dirty=bool(changes))
    except Error:
        return None


def commit_of(folder: Path, revision: str) -> str:
    """Return the commit that `revision` names in the repository of `folder`.

    Raises:
        Error: there is no git, no repository, or no such revision.
    """
    try:
        git(folder, "rev-parse", "--git-dir")
    except Error as error:
        raise Error(f"{revision}: {folder} cannot be used as a git checkout ({error})", USAGE) from None
    try:
        return git(folder, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}").decode()
    except Error:
        pass
    if git(folder, "rev-parse", "--is-shallow-repository") == b"true":
        raise Error(f"{revision}: this clone is shallow and does not hold it; run 'git fetch --unshallow' first", USAGE)
    raise Error(f"{revision}: no such git revision here; name a commit, a branch or a tag", USAGE)


def git(folder: Path, *arguments: str) -> bytes:
    """Run git in `folder` and return what it prints, without white space around it.

    Variables such as GIT_DIR are not passed on: if a git hook or alias started this program, they name its repository.

    Raises:
        Error: git is not there, or fails; the message ends with the last line that git printed.
    """
    environment = {name: value for name, value in os.environ.items() if not re.match("GIT_(?!CONFIG_)", name)}
    command = ["git", "-C", str(folder), *arguments]
    try:
        # A new session keeps Ctrl-C away from git: only this program handles it.
        done = subprocess.run(command, capture_output=True, timeout=120, start_new_session=True, env=environment)
    except FileNotFoundError:
        raise Error("git is not installed", USAGE) from None
    except (OSError, subprocess.SubprocessError) as error:
        raise Error(f"git failed: {error}", USAGE) from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise Error(lines[-1] if lines else f"git failed: {' '.join(command)}", USAGE)
    return done.stdout.strip()
