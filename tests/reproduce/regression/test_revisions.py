"""Tests of how `regression` copies git revisions to temporary folders.

The bisection, which finds the first commit that is slower, is tested, too.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reproduce.error import Error
from reproduce.numbers.significance import Decision
from reproduce.regression import bisect
from reproduce.regression.job import Samples, Settings
from reproduce.regression.judge import TOGETHER, Judgement, Limits
from reproduce.regression.timed import Clock
from reproduce.regression.trees import Project, Trees, committed, snapshot, trees

from ..made import commit, git


def of(root: Path, build: str | None = None) -> Project:
    return Project("torchgpipe", Path("cases.py"), root, build)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Make a git repository with the tags `empty` (without torchgpipe), `old` and `new`."""
    root = tmp_path / "root"
    package = root / "torchgpipe"
    package.mkdir(parents=True)
    (root / "other").write_text("")
    for tag in ("empty", "old", "new"):
        if tag != "empty":
            (package / "__init__.py").write_text(f"version = {tag!r}\n")
        commit(root, tag)
    return root


def version(folder: Path) -> str:
    text = (folder / "torchgpipe" / "__init__.py").read_text()
    return text.split("'")[1]


def test_a_snapshot_of_the_working_tree_as_it_is(root: Path, tmp_path: Path) -> None:
    file = root / "torchgpipe" / "__init__.py"

    clean = snapshot(of(root), tmp_path / "one")
    file.write_text("version = 'newer'\n")
    edited = snapshot(of(root), tmp_path / "two")
    file.write_text("version = 'edited meanwhile'\n")

    assert clean.name == "the working tree"
    assert clean.commit == git(root, "rev-parse", "new")
    assert not clean.dirty
    assert edited.dirty
    assert version(edited.folder) == "newer"


@pytest.mark.parametrize(
    ("revision", "build", "said"),
    [
        ("empty", None, r"empty holds no package torchgpipe and no src/torchgpipe below /"),
        ("new", "rm -r torchgpipe", "new holds no package torchgpipe"),
        ("new", "exit 3", "new: --build 'exit 3' ended with exit code 3; its output is"),
    ],
)
def test_what_cannot_be_had(
    revision: str, build: str | None, said: str, root: Path, tmp_path: Path
) -> None:
    with pytest.raises(Error, match=f"^{said}"):
        committed(of(root, build=build), revision, tmp_path / "base")


@pytest.mark.parametrize(
    ("place", "build", "where"),
    [
        ("src/parts/one.py", None, "src/parts/one.py"),
        ("parts/one/__init__.py", None, "parts/one/__init__.py"),
        ("code/one.py", "mkdir -p src/parts && cp code/one.py src/parts", "src/parts/one.py"),
    ],
    ids=["a file in src", "a folder", "built"],
)
def test_where_a_package_is(place: str, build: str | None, where: str, tmp_path: Path) -> None:
    """Check in which folder of a copied revision a package is found: at its top, or in `src`.

    Files that git ignores, such as builds, must not be copied.
    """
    root = tmp_path / "root"
    files = {place: "", ".gitignore": "*.so", "parts/one/old.so": ""}
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    commit(root, "1")
    project = Project("parts.one", Path("cases.py"), root, build)

    old = committed(project, "1", tmp_path / "old")
    new = snapshot(project, tmp_path / "new")

    for tree in (old, new):
        top = tree.folder.parent if where.startswith("src") else tree.folder
        assert top.parent == tmp_path
        assert (top / where).is_file()
        assert not list(top.rglob("*.so"))


def test_a_copy_keeps_programs_and_links(tmp_path: Path) -> None:
    """Check that both kinds of copies can be built by a program of the repository."""
    root = tmp_path / "root"
    (root / "one").mkdir(parents=True)
    (root / "version.py").write_text("version = 1\n")
    (root / "one" / "version.py").symlink_to("../version.py")
    (root / "two").symlink_to("one")  # a link to a folder
    (root / "away").symlink_to("/nowhere/at/all")
    program = root / "build.sh"
    program.write_text("#!/bin/sh\ntouch one/__init__.py\n")
    program.chmod(0o755)
    commit(root, "1")
    project = Project("one", Path("cases.py"), root, "./build.sh")

    for tree in (committed(project, "1", tmp_path / "old"), snapshot(project, tmp_path / "new")):
        assert (tree.folder / "one" / "__init__.py").is_file()
        assert (tree.folder / "one" / "version.py").read_text() == "version = 1\n"
        assert (tree.folder / "two" / "version.py").is_file()
        assert (tree.folder / "away").is_symlink()


def test_the_copies_are_removed(root: Path) -> None:
    with trees("old", "new", of(root)) as (base, head, _):
        assert version(base.folder) == "old"
        assert version(head.folder) == "new"
    assert not base.folder.parent.exists()


SLOWER, SAME = Decision("higher", 1.1), Decision("~", 1.0)
CASES: dict[str, Clock] = {"a": "cpu", "b": "cpu"}


class History:
    """A git repository with the versions 0, 1, … of a package, and a fake measurement of them.

    Args:
        root: The folder of the repository.
        monkeypatch: The fixture that replaces the measurement.
        commits: The number of versions.
        culprit: The first version that is slower.
        slower: The benchmark cases that are slower from the version `culprit` on.
    """

    def __init__(
        self,
        root: Path,
        monkeypatch: pytest.MonkeyPatch,
        commits: int,
        culprit: int,
        slower: list[str],
    ):
        self.root = root
        self.culprit = culprit
        self.slower = slower
        self.broken: list[int] = []
        self.disturbed: list[int] = []
        self.asked: list[tuple[int, list[str]]] = []
        self.said: list[str] = []
        package = root / "torchgpipe"
        package.mkdir(parents=True)
        for number in range(commits):
            (package / "__init__.py").write_text(f"version = '{number}'\n")
            commit(root, f"change-{number}")
            commit(root, f"v{number}")
        monkeypatch.setattr(bisect, "measure", self.measure)
        monkeypatch.setattr(bisect, "judge", self.judge)

    def measure(self, versions: Trees, settings: Settings, progress: object) -> dict[str, Samples]:
        assert version(versions.base.folder) == "0"
        number = int(version(versions.head.folder))
        self.asked.append((number, list(settings.cases)))
        unable = {"head": "ImportError: gone"} if number in self.broken else {}
        if 0 in self.broken:
            unable["base"] = "ImportError: gone"
        return {case: Samples(unable=unable) for case in settings.cases}

    def judge(self, samples: dict[str, Samples], limits: Limits) -> Judgement:
        number, _ = self.asked[-1]
        outcome = SLOWER if number >= self.culprit else SAME
        decisions = dict.fromkeys([*samples, TOGETHER], SAME)
        for case in decisions:
            if case in self.slower:
                decisions[case] = outcome
                if number in self.disturbed:
                    decisions[case] = replace(SAME, outcome="disturbed")
        return Judgement(samples, {"base": decisions, "also": {}}, limits.alpha)

    def search(self, good: str = "v0", bad: str = "HEAD", restarts: int = 20) -> str:
        settings = Settings(CASES, restarts, project=of(self.root))
        ends = (good, bad)
        return bisect.bisected(ends, settings, Limits(), lambda restarts: None, self.said.append)


@pytest.mark.parametrize("slower", [["b"], ["a", "b", TOGETHER], [TOGETHER]], ids=str)
@pytest.mark.parametrize("culprit", [1, 5, 9])
def test_the_first_slower_commit(
    culprit: int, slower: list[str], tmp_path: Path, monkeypatch: Any
) -> None:
    history = History(tmp_path, monkeypatch, 10, culprit, slower)
    (tmp_path / "torchgpipe" / "__init__.py").write_text("version = 'edited'\n")
    before = git(tmp_path, "status", "--porcelain", "--branch")
    measured_later = ["b"] if slower == ["b"] else ["a", "b"]

    found = history.search()

    _, title = found.split(maxsplit=1)
    assert title == f"change-{culprit}"
    assert git(tmp_path, "status", "--porcelain", "--branch") == before
    assert version(tmp_path) == "edited"
    assert len(history.asked) <= 1 + 4, "all nine would take long"
    assert len(history.said) == len(history.asked)
    first, *others = history.asked
    assert first == (9, ["a", "b"])
    for _, cases in others:
        assert cases == measured_later


def test_a_disturbed_commit_is_not_called_innocent(tmp_path: Path, monkeypatch: Any) -> None:
    history = History(tmp_path, monkeypatch, 10, 5, ["b"])
    history.disturbed = [5]
    with pytest.raises(Error, match=r"cannot tell whether .* is slower: other programs used"):
        history.search()


@pytest.mark.parametrize(
    ("good", "bad", "culprit", "broken", "restarts", "said"),
    [
        ("v0", "HEAD", 5, [], 20, "HEAD is not slower than v0"),
        ("HEAD", "v0", 1, [], 20, "no commit after HEAD, up to v0, changes torchgpipe"),
        ("v0", "nowhere", 1, [], 20, "nowhere: no such git revision"),
        ("v0", "v2", 1, [1], 20, "a cannot run in [0-9a-f]{9}: ImportError: gone"),
        ("v0", "v2", 1, [0], 20, "no case can run in v0: ImportError: gone"),
        ("v0", "v2", 1, [], 3, "no difference could be significant"),
    ],
)
def test_what_cannot_be_searched(
    good: str,
    bad: str,
    culprit: int,
    broken: list[int],
    restarts: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    history = History(tmp_path, monkeypatch, 3, culprit, ["a"])
    history.broken = broken
    with pytest.raises(Error, match=said):
        history.search(good, bad, restarts)
