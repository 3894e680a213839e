"""Copy the package of a revision, or of the working tree, into a folder of its own."""

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
    """Say what is measured: a package in a git repository's folder `root`, by a file's cases. A shell runs `build`."""

    package: str
    cases: Path
    root: Path
    build: str | None = None

    @property
    def paths(self) -> list[str]:
        """Say where the package may be. If it is built, that is an empty list, which means everything to git."""
        path = self.package.replace(".", "/")
        return (
            []
            if self.build
            else [f"{place}{path}{end}" for place in ("", "src/") for end in ("", ".py")]
        )


TORCHGPIPE = Project("torchgpipe", ROOT / "reproduce" / "regression" / "cases.py", ROOT)


@dataclass(frozen=True)
class Tree:
    """Hold a folder to import the package from, its name for the user, its commit, and whether it has changes."""

    folder: Path
    name: str
    commit: str | None
    dirty: bool = False


@contextlib.contextmanager
def trees(base: str, head: str | None, project: Project) -> Iterator[tuple[Tree, Tree]]:
    """Copy both sides into a temporary folder. It is removed at the end, also if a signal ends this program."""
    with _terminable(), tempfile.TemporaryDirectory(prefix="regression-") as name:
        folder = Path(name)
        old = committed(project, base, folder / "base")
        new = (
            snapshot(project, folder / "head")
            if head is None
            else committed(project, head, folder / "head")
        )
        yield old, new


def committed(project: Project, revision: str, folder: Path) -> Tree:
    """Copy the package of a revision into `folder` and build it; raise `Error` if there is none, or the build fails."""
    commit = commit_of(project.root, revision)
    archive = folder.with_suffix(".zip")
    found = (
        git(project.root, "ls-tree", "-z", "--name-only", commit, "--", *project.paths)
        .decode()
        .split("\0")
    )
    git(project.root, "archive", f"--output={archive}", commit, "--", *filter(None, found))
    shutil.unpack_archive(archive, folder)
    return Tree(_built(project, folder, revision), revision, commit)


def snapshot(project: Project, folder: Path) -> Tree:
    """Copy the package of the working tree as it is, but for what git ignores. Edits during the job change nothing."""
    listed = ("ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in git(project.root, *listed, "--", *project.paths).decode().split("\0"):
        if name and (project.root / name).is_file():  # it may be deleted, or a submodule
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(project.root / name, folder / name)
    dirty = bool(git(project.root, "status", "--porcelain", "--", *project.paths))
    return Tree(
        _built(project, folder, "the working tree"),
        "the working tree",
        commit_of(project.root, "HEAD"),
        dirty,
    )


def _built(project: Project, folder: Path, name: str) -> Path:
    """Build the package of the copy in `folder`, and return the folder to import it from."""
    build = project.build or "true"
    if code := subprocess.run(
        build, shell=True, cwd=folder, stdout=2
    ).returncode:  # 1 is for the table
        raise Error(
            f"{name}: --build {build!r} ended with exit code {code}; above is what it printed"
        )
    path = project.package.replace(".", "/")
    for place in (folder, folder / "src"):
        if PathFinder.find_spec(
            project.package, [str((place / path).parent)]
        ):  # also what is compiled
            return place
    raise Error(f"{name} holds no package {path} and no src/{path} below {project.root}")


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Make SIGTERM (sent by `timeout`) and SIGHUP (sent when the terminal closes) raise `SystemExit`."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    ours = {
        number: handler for number, handler in before.items() if handler is not signal.SIG_IGN
    }  # else `nohup`
    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)
