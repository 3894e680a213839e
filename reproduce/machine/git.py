"""Run git, and find out which revision is checked out."""

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
    """A version of the source code: a commit, and changes that are not committed.

    Attributes:
        revision: The hash of the commit.
        dirty: Whether tracked files had changes that were not committed.
        changes: A digest of these changes. It is None if there are none, or in old records.
    """

    revision: str
    dirty: bool
    changes: str | None = None

    def name(self, digits: int, sign: str = "+") -> str:
        """Return a name of this version: the hash of the commit, and the digest of any changes.

        The name has the first digits of the hash. `sign` stands before the digest. If `sign` is
        "+", an example is `3f2a91c+0b7d44e2`.
        """
        revision = self.revision[:digits]
        if not self.dirty:
            return revision
        changes = f"{sign}{self.changes or ''}".rstrip()
        return revision + changes


def checkout(folder: Path = ROOT) -> Git | None:
    """Return the commit that is checked out in `folder`, and any changes that are not committed.

    Return None if git fails, or if `folder` is not the top folder of a checkout.
    """
    try:
        prefix = git(folder, "rev-parse", "--show-prefix")
        if prefix:  # the checkout of another project, which has installed this package
            return None
        revision = git(folder, "rev-parse", "--verify", "HEAD").decode()
        plain = ("--binary", "--no-ext-diff", "--no-textconv", "--no-color")
        diff = git(folder, "diff", "HEAD", *plain)
    except Error:
        return None
    if not diff:
        return Git(revision, dirty=False)
    digest = hashlib.sha256(diff).hexdigest()
    return Git(revision, dirty=True, changes=digest[:8])


def commit_of(folder: Path, revision: str) -> str:
    """Return the hash of the commit that `revision` names in the repository of `folder`.

    `revision` can be a hash, a branch or a tag. Raise `Error` if there is no such commit.
    """
    try:
        git(folder, "rev-parse", "--git-dir")
    except Error as error:
        raise Error(f"{revision}: {folder} cannot be used as a git checkout ({error})") from None
    name = f"{revision}^{{commit}}"
    try:
        return git(folder, "rev-parse", "--verify", "--quiet", "--end-of-options", name).decode()
    except Error:
        pass
    if git(folder, "rev-parse", "--is-shallow-repository") == b"true":
        raise Error(
            f"{revision}: this clone is shallow and does not have this revision; "
            "run 'git fetch --unshallow' first"
        )
    raise Error(f"{revision}: no such git revision here; name a commit, a branch or a tag")


def commit_file(folder: Path, branch: str, name: str, change: Callable[[bytes], bytes]) -> None:
    """Commit a changed or new file to a branch that is not checked out, or raise `Error`.

    The index and the files of the checkout do not change.

    Args:
        folder: The folder of the repository.
        branch: The name of the branch, which may be new.
        name: The path of the file within the repository.
        change: A function that gets the old content of the file and returns the new content. The
            old content is empty if there is no such file.
    """
    short = git(folder, "check-ref-format", "--branch", branch).decode()
    ref = f"refs/heads/{short}"
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise Error(f"{name}: name the file on the branch by a relative path within the repository")
    worktrees = git(folder, "worktree", "list", "--porcelain").decode()
    if f"branch {ref}" in worktrees.splitlines():
        raise Error(
            f"the branch {branch} is checked out, and a commit would make the files on disk "
            "outdated: name another branch"
        )
    old = git(folder, "for-each-ref", "--format=%(objectname)", ref).decode()
    before = b""
    # Without --full-tree, `ls-tree` takes the path as relative to the folder; `cat-file` does not.
    if old and git(folder, "ls-tree", "--full-tree", old, "--", name):
        before = git(folder, "cat-file", "blob", f"{old}:{name}")
    content = change(before)
    commands = [
        f"commit {ref}",
        "committer reproduce <reproduce@localhost> now",
        f"data <<.\n{name}\n.",
    ]
    if old:
        commands.append(f"from {old}")  # git refuses the update if the branch has moved on
    commands.append(f"M 100644 inline {name}")
    commands.append(f"data {len(content)}\n")
    given = "\n".join(commands).encode() + content
    git(folder, "fast-import", "--quiet", "--date-format=now", given=given)


def git(folder: Path, *arguments: str, given: bytes | None = None) -> bytes:
    """Run git in `folder`, with `given` as its input; return its output without surrounding spaces.

    Environment variables such as GIT_DIR are not passed on. They would matter if a git hook started
    this program: git would use the hook's repository instead of that of `folder`.

    Raises:
        Error: git is not installed, or it failed. The message is the last line that git printed.
    """
    of_repository = re.compile("GIT_(?!CONFIG_)")
    env = {name: value for name, value in os.environ.items() if not of_repository.match(name)}
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
