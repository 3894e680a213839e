"""Copy a package, as it is in a git revision or in the working tree, into a separate folder."""

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NamedTuple

from reproduce.error import Error
from reproduce.machine.archives import unpack
from reproduce.machine.description import ROOT
from reproduce.machine.git import commit_of, git


@dataclass(frozen=True)
class Project:
    """A package whose versions are compared.

    Attributes:
        package: The name under which the package is imported.
        cases: The Python file that defines what is timed.
        root: The top folder of the git repository.
        build: A shell command that builds the package in a copy of the repository. It is None if
            the package need not be built.
        gates: The modules of the gates, which are programs that check the package without timing.
    """

    package: str
    cases: Path
    root: Path
    build: str | None = None
    gates: tuple[str, ...] = ()

    @property
    def paths(self) -> list[str]:
        """Return the paths where the package may be, relative to the top folder of the repository.

        If the package has to be built, the list is empty, because the build may need any file. git
        commands take an empty list as all paths.
        """
        if self.build:
            return []
        path = self.package.replace(".", "/")
        return [path, f"{path}.py", f"src/{path}", f"src/{path}.py"]


TORCHGPIPE = Project(
    "torchgpipe",
    ROOT / "reproduce" / "regression" / "cases.py",
    ROOT,
    gates=("benchmarks.gates.counts", "benchmarks.gates.meeting"),
)


@dataclass(frozen=True)
class Tree:
    """A copy of one version of the package.

    Attributes:
        folder: The folder to import the package from.
        name: The name of the version that is shown to the user.
        commit: The hash of the version's commit.
        dirty: Whether the copy has changes that are not committed.
    """

    folder: Path
    name: str
    commit: str | None
    dirty: bool = False


class Trees(NamedTuple):
    """The compared versions of a package: the new version `head`, and one or two old versions."""

    base: Tree
    head: Tree
    also: Tree | None = None


@contextlib.contextmanager
def trees(
    base: str, head: str | None, project: Project, also: str | None = None
) -> Iterator[Trees]:
    """Copy two or three versions of the package into a temporary folder, and yield the copies.

    The folder is removed at the end, even if SIGTERM or SIGHUP ends this program.

    Args:
        base: The git revision of the old version.
        head: The git revision of the new version, or None for the working tree.
        project: The package.
        also: The git revision of a second old version, from before `base`, or None.
    """
    with tempfile.TemporaryDirectory(prefix="regression-") as name:
        folder = Path(name)
        old = committed(project, base, folder / "base")
        if head is None:
            new = snapshot(project, folder / "head")
        else:
            new = committed(project, head, folder / "head")
        second = None if also is None else committed(project, also, folder / "also")
        yield Trees(old, new, second)


def committed(project: Project, revision: str, folder: Path) -> Tree:
    """Copy the package as it is in a git revision into `folder`, and build the copy.

    Raises:
        Error: The revision does not exist, it does not contain the package, or the build fails.
    """
    root = project.root
    commit = commit_of(root, revision)
    archive = folder.with_suffix(".tar")
    listed = git(root, "ls-tree", "-z", "--name-only", commit, "--", *project.paths)
    found = filter(None, listed.decode().split("\0"))
    git(root, "archive", f"--output={archive}", commit, "--", *found)
    unpack(archive, folder, "tar")
    return Tree(_built(project, folder, revision), revision, commit)


def snapshot(project: Project, folder: Path) -> Tree:
    """Copy the package as it is in the working tree into `folder`, and build the copy.

    The copy includes uncommitted changes, but no files that git ignores. It does not change if the
    user edits the working tree while the copy is timed.
    """
    root = project.root
    options = ("--cached", "--others", "--exclude-standard")
    listed = git(root, "ls-files", "-z", *options, "--", *project.paths)
    for name in listed.decode().split("\0"):
        source = root / name
        if name and (source.is_file() or source.is_symlink()):  # it may be deleted, or a submodule
            copy = folder / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, copy, follow_symlinks=False)
    dirty = bool(git(root, "status", "--porcelain", "--", *project.paths))
    name = "the working tree"
    built = _built(project, folder, name)
    return Tree(built, name, commit_of(root, "HEAD"), dirty)


def _built(project: Project, folder: Path, name: str) -> Path:
    """Build the copied package in `folder`; return the folder to import the package from.

    Args:
        project: The package, and the command that builds it.
        folder: The folder with the copy.
        name: The name of the version, for error messages.
    """
    build = project.build or "true"
    # The output of the build goes to stderr, because stdout is for the table.
    code = subprocess.run(build, shell=True, cwd=folder, stdout=2).returncode
    if code:
        raise Error(
            f"{name}: --build {build!r} ended with exit code {code}; its output is printed above"
        )
    path = project.package.replace(".", "/")
    for place in (folder, folder / "src"):
        parent = (place / path).parent
        if PathFinder.find_spec(project.package, [str(parent)]):  # also finds compiled packages
            return place
    raise Error(f"{name} holds no package {path} and no src/{path} below {project.root}")
