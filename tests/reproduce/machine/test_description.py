"""Machine: what a record says about it is true, and None where it cannot be known."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from reproduce.machine.description import git, load_average, machine, versions
from reproduce.records.record import Gpu


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
    assert {"click", "tabulate", "torchvision", "cuda", "cudnn", "driver"} <= set(found)


SMI = """\
GPU-0a-1, 1980, 2619, 700.00, 5, 16
GPU-0a-2, [N/A], [N/A], [N/A], [N/A], [N/A]
"""
NVLINK = """\
GPU 0: NVIDIA H200 (UUID: GPU-0a-1)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
\t Link 2: <inactive>
GPU 1: NVIDIA H200 (UUID: GPU-0a-2)
\t Link 0: <inactive>
"""


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's clocks, power limit and links come from its driver, and are None where it does not tell."""

    def properties(i: int) -> SimpleNamespace:
        return SimpleNamespace(name="NVIDIA H200", total_memory=1 << 37, uuid=f"0a-{i + 1}")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(
        "reproduce.machine.description._output", lambda *command: NVLINK if "nvlink" in command else SMI
    )
    assert machine().gpus == [
        Gpu("NVIDIA H200", 1 << 37, 1980.0, 2619.0, 700.0, "PCIe 5.0 x16, 2 x NVLink"),
        Gpu("NVIDIA H200", 1 << 37),
    ]
    monkeypatch.setattr("reproduce.machine.description._output", lambda *command: None)
    assert machine().gpus == [Gpu("NVIDIA H200", 1 << 37)] * 2, "a machine without nvidia-smi"


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
