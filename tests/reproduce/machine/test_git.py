"""Git: what is checked out, and what a revision names; whatever is wrong is one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from reproduce.error import Error
from reproduce.machine.git import Git, checkout, commit_of

from ..repository import commit
from ..repository import git as run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Make a repository of two revisions, `old` and HEAD, in a folder; `shallow` beside it is a clone of HEAD alone."""
    root = tmp_path / "root"
    root.mkdir()
    for tag in ("old", "new"):
        (root / "file").write_text(tag)
        commit(root, tag)
    run(tmp_path, "clone", "--quiet", "--depth", "1", root.as_uri(), "shallow")
    return root


def test_checkout(root: Path) -> None:
    head = run(root, "rev-parse", "HEAD")
    assert checkout(root) == Git(head, dirty=False)
    (root / "record.json").write_text("{}")
    assert checkout(root) == Git(head, dirty=False), "a file that git does not know, such as a record, is no source"
    (root / "file").write_text("edited")
    assert checkout(root) == Git(head, dirty=True)


def test_no_checkout_is_none(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checkout(tmp_path) is None
    (root / "venv").mkdir()
    assert checkout(root / "venv") is None, "another project's, which has this one installed"
    run(tmp_path, "init")
    assert checkout(tmp_path) is None, "no commit"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert checkout(root) is None, "no git"
    with pytest.raises(Error, match="git is not installed"):
        commit_of(root, "HEAD")


def test_a_repository_that_the_environment_names_is_not_used(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, "init")
    old = run(root, "rev-parse", "old")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    assert commit_of(root, "old") == old


@pytest.mark.parametrize(
    ("folder", "revision", "said"),
    [
        ("root", "nowhere", "^nowhere: no such git revision here; name a commit, a branch or a tag$"),
        ("root", "--help", "^--help: no such git revision here"),
        ("root", "", "^: no such git revision here"),
        ("shallow", "old", "^old: this clone is shallow and does not hold it; run 'git fetch --unshallow' first$"),
        (".", "HEAD", r"^HEAD: .* cannot be used as a git checkout \(.*not a git repository"),
    ],
)
def test_a_revision_that_is_not_there(folder: str, revision: str, said: str, root: Path, tmp_path: Path) -> None:
    with pytest.raises(Error, match=said) as caught:
        commit_of(tmp_path / folder, revision)
    assert caught.value.exit_code == 2
