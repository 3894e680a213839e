"""Trees: a revision's torchgpipe in a folder of its own, which is gone afterwards; one line for what cannot be had."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from reproduce.error import Error
from reproduce.regression.trees import checked_out, snapshot, trees


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
        git(root, "commit", "--quiet", "--allow-empty", "-m", tag)
        git(root, "tag", tag)
    return root


def worktrees(root: Path) -> int:
    return len(git(root, "worktree", "list").splitlines())


def version(folder: Path) -> str:
    return (folder / "torchgpipe" / "__init__.py").read_text()


@pytest.mark.parametrize("revision", ["old", "HEAD~1"])
def test_a_revision_beside_the_working_tree(root: Path, tmp_path: Path, revision: str) -> None:
    with checked_out(root, revision, tmp_path / "base") as tree:
        assert version(tree.folder) == "version = 'old'\n" and version(root) == "version = 'new'\n"
        assert (tree.name, tree.commit, tree.dirty) == (revision, git(root, "rev-parse", "old"), False)
        assert [path.name for path in tree.folder.iterdir() if path.name != ".git"] == ["torchgpipe"], "and no more"
        assert worktrees(root) == 2
    assert worktrees(root) == 1 and not (tmp_path / "base").exists()
    assert git(root, "status", "--porcelain") == ""


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, SystemExit])
def test_it_is_removed_whatever_happens(root: Path, tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), checked_out(root, "old", tmp_path / "base") as tree:
        (tree.folder / "torchgpipe" / "new file").write_text("")
        raise error
    assert worktrees(root) == 1 and not (tmp_path / "base").exists()


def test_a_snapshot_of_the_working_tree_as_it_is(root: Path, tmp_path: Path) -> None:
    tree = snapshot(root, tmp_path / "one")
    assert (tree.name, tree.commit, tree.dirty) == ("the working tree", git(root, "rev-parse", "new"), False)
    (root / "torchgpipe" / "__init__.py").write_text("version = 'newer'\n")
    tree = snapshot(root, tmp_path / "two")
    assert tree.dirty and version(tree.folder) == "version = 'newer'\n"
    (root / "torchgpipe" / "__init__.py").write_text("version = 'edited meanwhile'\n")
    assert version(tree.folder) == "version = 'newer'\n"


@pytest.mark.parametrize(
    ("revision", "said"),
    [
        ("nowhere", "nowhere: no such git revision here; name a commit, a branch or a tag"),
        ("empty", "empty: that revision holds no folder torchgpipe"),
    ],
)
def test_what_cannot_be_had_is_one_line(root: Path, tmp_path: Path, revision: str, said: str) -> None:
    with pytest.raises(Error) as error, checked_out(root, revision, tmp_path / "base"):
        pytest.fail("not reached")
    assert str(error.value) == said
    assert worktrees(root) == 1 and not (tmp_path / "base").exists()


def test_no_git(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Error, match="git is not installed"), checked_out(root, "old", tmp_path / "base"):
        pytest.fail("not reached")
    tree = snapshot(root, tmp_path / "head")
    assert tree.commit is None and version(tree.folder) == "version = 'new'\n"


def test_what_a_hook_says_of_its_repository_is_not_obeyed(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook runs with the user's index in the environment; the base's files must not get into it."""
    monkeypatch.setenv("GIT_DIR", str(root / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(root / ".git" / "index"))
    monkeypatch.setenv("GIT_WORK_TREE", str(root))
    with checked_out(root, "old", tmp_path / "base") as tree:
        assert version(tree.folder) == "version = 'old'\n" and version(root) == "version = 'new'\n"
        assert git(root, "status", "--porcelain") == ""
    assert worktrees(root) == 1 and git(root, "status", "--porcelain") == ""


@pytest.mark.parametrize("half", [False, True])
def test_a_worktree_that_git_did_not_finish_is_removed(half: bool, root: Path, tmp_path: Path) -> None:
    with checked_out(root, "old", tmp_path / "base") as tree:
        git(root, "worktree", "lock", "--reason", "initializing", str(tree.folder))
        if half:
            (tree.folder / ".git").unlink()
    assert worktrees(root) == 1 and not (tmp_path / "base").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_an_end_like_any_other(number: signal.Signals, root: Path) -> None:
    before = signal.signal(number, signal.SIG_DFL)  # the suite itself may run under nohup
    try:
        with pytest.raises(SystemExit) as exit, trees("old", None, root) as (base, head):
            assert version(base.folder) != version(head.folder)
            os.kill(os.getpid(), number)
            signal.pause()
        assert exit.value.code == 128 + number
        assert worktrees(root) == 1 and not base.folder.parent.exists()
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_a_signal_that_is_ignored_stays_so(root: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with trees("old", "new", root):
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
