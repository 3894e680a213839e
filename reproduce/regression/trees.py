"""Copy the package of a git revision, or of the working tree, into a separate folder."""

import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from types import FrameType

from reproduce.error import Error
from reproduce.machine.description import ROOT
from reproduce.machine.git import commit_of, git


@dataclass(frozen=True)
class Project:
    """A package to measure: its git repository `root`, and the file of its cases.

    A shell runs `build` to build the package.
    """

    package: str
    cases: Path
    root: Path
    build: str | None = None

    @property
    def paths(self) -> list[str]:
        """Return the paths at which the package can be.

        If the package is built, it can be anywhere, and the list is empty. To git, an empty list
        means all paths.
        """
        if self.build:
            return []
        path = self.package.replace(".", "/")
        return [path, f"{path}.py", f"src/{path}", f"src/{path}.py"]


TORCHGPIPE = Project("torchgpipe", ROOT / "reproduce" / "regression" / "cases.py", ROOT)


@dataclass(frozen=True)
class Tree:
    """A copy of a package: the folder to import it from, its name for the user, and its commit.

    `dirty` says that the copy has changes that are not committed.
    """

    folder: Path
    name: str
    commit: str | None
    dirty: bool = False


@contextlib.contextmanager
def trees(base: str, head: str | None, project: Project) -> Iterator[tuple[Tree, Tree]]:
    """Copy base and head into a temporary folder, and yield both copies.

    The folder is removed at the end, also if a signal ends this program.
    """
    with _terminable(), tempfile.TemporaryDirectory(prefix="regression-") as name:
        folder = Path(name)
        old = committed(project, base, folder / "base")
        if head is None:
            new = snapshot(project, folder / "head")
        else:
            new = committed(project, head, folder / "head")
        yield old, new


def committed(project: Project, revision: str, folder: Path) -> Tree:
    """Copy the package of a revision into `folder` and build it.

    Raises:
        Error: There is no such revision or package, or the build fails.
    """
    root = project.root
    commit = commit_of(root, revision)
    archive = folder.with_suffix(".zip")
    listed = git(root, "ls-tree", "-z", "--name-only", commit, "--", *project.paths)
    found = filter(None, listed.decode().split("\0"))
    git(root, "archive", f"--output={archive}", commit, "--", *found)
    shutil.unpack_archive(archive, folder)
    return Tree(_built(project, folder, revision), revision, commit)


def snapshot(project: Project, folder: Path) -> Tree:
    """Copy the package of the working tree with uncommitted changes, but without ignored files.

    If the user edits the working tree during the job, the copy does not change.
    """
    root = project.root
    options = ("--cached", "--others", "--exclude-standard")
    listed = git(root, "ls-files", "-z", *options, "--", *project.paths)
    for name in listed.decode().split("\0"):
        source = root / name
        if name and source.is_file():  # it may be deleted, or a submodule
            copy = folder / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, copy)
    dirty = bool(git(root, "status", "--porcelain", "--", *project.paths))
    name = "the working tree"
    built = _built(project, folder, name)
    return Tree(built, name, commit_of(root, "HEAD"), dirty)


def _built(project: Project, folder: Path, name: str) -> Path:
    """Build the package of the copy in `folder`, and return the folder to import it from."""
    build = project.build or "true"
    # The output of the build goes to stderr, because stdout is for the table.
    code = subprocess.run(build, shell=True, cwd=folder, stdout=2).returncode
    if code:
        raise Error(
            f"{name}: --build {build!r} ended with exit code {code}; above is what it printed"
        )
    path = project.package.replace(".", "/")
    for place in (folder, folder / "src"):
        parent = (place / path).parent
        if PathFinder.find_spec(project.package, [str(parent)]):  # also finds compiled packages
            return place
    raise Error(f"{name} holds no package {path} and no src/{path} below {project.root}")


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise `SystemExit` within the `with` block.

    `timeout` sends SIGTERM. SIGHUP is sent when the terminal closes.
    """

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    ours = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        handler = signal.getsignal(number)
        if handler is not signal.SIG_IGN:  # `nohup` sets SIG_IGN
            ours[number] = handler
    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)
