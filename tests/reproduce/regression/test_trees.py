"""Trees: torchgpipe in a folder of its own, which is gone afterwards; one line for what cannot be had."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from reproduce.error import Error
from reproduce.regression.trees import committed, snapshot, trees

from ..repository import commit, git


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Make a repository of three revisions: without torchgpipe (`empty`), `old`, and `new`."""
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
    return (folder / "torchgpipe" / "__init__.py").read_text().split("'")[1]


def test_a_revision(root: Path, tmp_path: Path) -> None:
    (root / "torchgpipe" / "__init__.py").write_text("version = 'edited'\n")
    before = git(root, "status", "--porcelain")
    tree = committed(root, "HEAD~1", tmp_path / "base")
    assert (tree.name, tree.commit, tree.dirty) == ("HEAD~1", git(root, "rev-parse", "old"), False)
    assert [path.name for path in tree.folder.iterdir()] == ["torchgpipe"] and version(tree.folder) == "old"
    assert version(root) == "edited" and git(root, "status", "--porcelain") == before


def test_a_snapshot_of_the_working_tree_as_it_is(root: Path, tmp_path: Path) -> None:
    tree = snapshot(root, tmp_path / "one")
    assert (tree.name, tree.commit, tree.dirty) == ("the working tree", git(root, "rev-parse", "new"), False)
    (root / "torchgpipe" / "__init__.py").write_text("version = 'newer'\n")
    tree = snapshot(root, tmp_path / "two")
    (root / "torchgpipe" / "__init__.py").write_text("version = 'edited meanwhile'\n")
    assert tree.dirty and version(tree.folder) == "newer"


def test_what_cannot_be_had(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Error, match=r"^empty: that revision holds no folder torchgpipe$"):
        committed(root, "empty", tmp_path / "base")
    monkeypatch.setenv("PATH", str(tmp_path))
    tree = snapshot(root, tmp_path / "head")
    assert tree.commit is None and version(tree.folder) == "new", "without git there is a tree all the same"


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
