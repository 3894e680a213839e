"""Trees: torchgpipe in a folder of its own, which is gone afterwards; one line for what cannot be had."""

from __future__ import annotations

import contextlib
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
@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_signal_is_an_end_like_any_other_unless_it_is_ignored(
    number: signal.Signals, before: signal.Handlers, root: Path
) -> None:
    own = signal.signal(number, before)  # the suite itself may run under nohup
    ended = pytest.raises(SystemExit) if before is signal.SIG_DFL else contextlib.nullcontext()
    try:
        with ended as exit, trees("old", "new", root) as (base, head):
            assert (version(base.folder), version(head.folder)) == ("old", "new")
            os.kill(os.getpid(), number)
            if exit is not None:
                signal.pause()
        assert exit is None or exit.value.code == 128 + number
        assert not base.folder.parent.exists() and signal.getsignal(number) is before
    finally:
        signal.signal(number, own)
