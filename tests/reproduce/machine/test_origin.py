"""Tests of the git address from which `reproduce` can be installed on another machine."""

import json
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reproduce.error import Error
from reproduce.machine import origin
from reproduce.machine.git import checkout
from reproduce.machine.origin import own_address, pip_address, split_revision

from ..made import commit, git

URL = "https://host.example/owner/name"


@pytest.mark.parametrize(
    ("given", "expected", "url", "revision"),
    [
        (f"{URL}@v1", f"git+{URL}@v1", URL, "v1"),
        (f"git+{URL}", f"git+{URL}", URL, None),
        (f"https://me:secret@{URL[8:]}@v1", f"git+{URL}@v1", URL, "v1"),
        (
            "git@host.example:owner/name.git",
            "git+ssh://git@host.example/owner/name.git",
            "ssh://git@host.example/owner/name.git",
            None,
        ),
        ("ssh://git@h/o/n@v1", "git+ssh://git@h/o/n@v1", "ssh://git@h/o/n", "v1"),
    ],
)
def test_an_address(given: str, expected: str, url: str, revision: str | None) -> None:
    address = pip_address(given)
    assert address == expected
    assert split_revision(address) == (url, revision)


def installed(monkeypatch: pytest.MonkeyPatch, source: dict[str, Any] | None) -> None:
    """Pretend that pip has installed `reproduce` from a certain source.

    Args:
        monkeypatch: The fixture that replaces a function.
        source: What pip has noted about the source, such as its address. If `None`, pip has noted
            nothing.
    """
    text = None if source is None else json.dumps(source)
    made = SimpleNamespace(read_text=lambda name: text)
    monkeypatch.setattr(metadata, "distribution", lambda name: made)


def test_what_pip_installed_comes_from_the_same_address(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, {"url": URL, "vcs_info": {"vcs": "git", "commit_id": "abc"}})
    assert own_address() == f"git+{URL}@abc"


def test_what_was_installed_from_a_folder_has_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, {"url": "file:///o/n", "vcs_info": {"vcs": "git", "commit_id": "abc"}})
    with pytest.raises(Error, match="was installed from a folder of this machine"):
        own_address()


@pytest.mark.parametrize("source", [None, {"url": "file:///x", "dir_info": {"editable": True}}])
def test_a_checkout_comes_from_its_remote(
    source: dict[str, Any] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the address of `reproduce` if it runs from a git checkout.

    The commit must have been pushed to the remote repository. If the commit has a tag, the address
    has this tag. If not, the address has the hash of the commit.
    """
    installed(monkeypatch, source)
    monkeypatch.setattr(origin, "ROOT", tmp_path)
    monkeypatch.setattr(origin, "checkout", lambda: checkout(tmp_path))
    with pytest.raises(Error, match="was not installed from a git repository"):
        own_address()
    commit(tmp_path, "v1")
    with pytest.raises(Error, match="has no remote repository origin"):
        own_address()
    git(tmp_path, "remote", "add", "origin", str(tmp_path))
    for folder in (str(tmp_path), tmp_path.as_uri()):
        git(tmp_path, "remote", "set-url", "origin", folder)
        with pytest.raises(Error, match=r"origin of the checkout .* is a folder of this machine"):
            own_address()
    git(tmp_path, "remote", "set-url", "origin", URL)
    with pytest.raises(Error, match=r"the commit [0-9a-f]{9} of this program was not pushed"):
        own_address()
    revision = git(tmp_path, "rev-parse", "HEAD")
    git(tmp_path, "update-ref", "refs/remotes/origin/main", revision)
    assert own_address() == f"git+{URL}@v1"
    git(tmp_path, "tag", "--delete", "v1")
    assert own_address() == f"git+{URL}@{revision}"
