"""Trees: torchgpipe in a folder of its own, which is gone afterwards; one line for what cannot be had."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from reproduce.error import Error
from reproduce.regression.trees import committed, snapshot, trees


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
    done = subprocess.run(["git", "-C", str(folder), *who, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Make a repository of three revisions: without torchgpipe (`empty`), `old`, and `new`."""
    root = tmp_path / "root"
    package = root / "torchgpipe"
    package.mkdir(parents=True)
    git(root, "init", "--quiet")
    (root / "other").write_text("")
    for tag in ("empty", "old", "new"):
        if tag != "empty":
            (package / "__init__.py").write_text(f"version = {tag!r}\n")
        git(root, "add", ".")
        git(root, "commit", "--quiet", "-m", tag)
        git(root, "tag", tag)
    return root


def version(folder: Path) -> str:
    return (folder / "torchgpipe" / "__init__.py").read_text().split("'")[1]


@pytest.mark.parametrize("revision", ["old", "HEAD~1"])
def test_a_revision(root: Path, tmp_path: Path, revision: str) -> None:
    (root / "torchgpipe" / "__init__.py").write_text("version = 'edited'\n")
    before = git(root, "status", "--porcelain")
    tree = committed(root, revision, tmp_path / "base")
    assert (tree.name, tree.commit, tree.dirty) == (revision, git(root, "rev-parse", "old"), False)
    assert [path.name for path in tree.folder.iterdir()] == ["torchgpipe"] and version(tree.folder) == "old"
    assert version(root) == "edited" and git(root, "status", "--porcelain") == before


def test_a_snapshot_of_the_working_tree_as_it_is(root: Path, tmp_path: Path) -> None:
    tree = snapshot(root, tmp_path / "one")
    assert (tree.name, tree.commit, tree.dirty) == ("the working tree", git(root, "rev-parse", "new"), False)
    (root / "torchgpipe" / "__init__.py").write_text("version = 'newer'\n")
    tree = snapshot(root, tmp_path / "two")
    (root / "torchgpipe" / "__init__.py").write_text("version = 'edited meanwhile'\n")
    assert tree.dirty and version(tree.folder) == "newer"


def test_a_revision_without_torchgpipe_is_refused(root: Path, tmp_path: Path) -> None:
    with pytest.raises(Error, match=r"^empty: that revision holds no folder torchgpipe$"):
        committed(root, "empty", tmp_path / "base")


def test_no_git(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    tree = snapshot(root, tmp_path / "head")
    assert tree.commit is None and version(tree.folder) == "new"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_an_end_like_any_other(number: signal.Signals, root: Path) -> None:
    before = signal.signal(number, signal.SIG_DFL)  # the suite itself may run under nohup
    try:
        with pytest.raises(SystemExit) as exit, trees("old", None, root) as (base, head):
            assert (version(base.folder), version(head.folder)) == ("old", "new")
            os.kill(os.getpid(), number)
            signal.pause()
        assert exit.value.code == 128 + number
        assert not base.folder.parent.exists()
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_a_signal_that_is_ignored_stays_so(root: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with trees("old", "new", root) as (base, head):
            os.kill(os.getpid(), signal.SIGHUP)
            assert (version(base.folder), version(head.folder)) == ("old", "new")
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
