"""Machine: what a record says about it is true, and None where it cannot be known."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import torch

from reproduce.machine import git, load_average, machine, versions


def test_machine() -> None:
    found = machine()
    assert 1 <= found.cores <= found.cores_installed == os.cpu_count()
    assert found.cpu and found.system.startswith(platform.system())
    assert found.memory is None or found.memory > 2**28
    assert len(found.gpus) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)


def test_versions() -> None:
    import torchgpipe

    found = versions()
    assert found["python"] == platform.python_version()
    assert found["torch"] is not None and torch.__version__.startswith(found["torch"].split("+")[0])
    assert found["torchgpipe"] == torchgpipe.__version__
    assert {"click", "tabulate", "torchvision", "cuda", "cudnn"} <= set(found)


def test_load_average() -> None:
    found = load_average()
    assert found is None or len(found) == 3


def test_git_revision_and_changes(tmp_path: Path) -> None:
    def run(*command: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
        return subprocess.run(
            ["git", *identity, *command], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    assert git(tmp_path) is None, "no checkout"
    run("init")
    assert git(tmp_path) is None, "no commit"
    (tmp_path / "file").write_text("1")
    run("add", "file")
    run("commit", "--no-verify", "-m", "message")
    found = git(tmp_path)
    assert found is not None and (found.revision, found.dirty) == (run("rev-parse", "HEAD"), False)
    (tmp_path / "record.json").write_text("{}")
    found = git(tmp_path)
    assert found is not None and not found.dirty, "a file that git does not know, such as a record, changes no source"
    (tmp_path / "file").write_text("2")
    found = git(tmp_path)
    assert found is not None and found.dirty
