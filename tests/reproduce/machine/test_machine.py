"""The description of machine and checkout in records is true; missing devices or revisions are one-line errors."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import reproduce.machine.devices
import torchgpipe
from reproduce.error import Error
from reproduce.machine.allocator import KEEP_FREED
from reproduce.machine.description import ROOT, Gpu, load_average, machine, versions
from reproduce.machine.devices import MOST_DEVICES, Devices, cores, find_devices
from reproduce.machine.git import Git, checkout, commit_of

from ..repository import commit
from ..repository import git as run


def test_this_machine() -> None:
    found = machine()
    assert 1 <= found.cores <= found.cores_installed == os.cpu_count()
    assert found.cpu and found.system.startswith(platform.system())
    assert found.memory is None or found.memory > 2**28
    assert len(found.gpus) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    known = versions()
    assert (known["python"], known["torchgpipe"]) == (platform.python_version(), torchgpipe.__version__)
    assert torch.__version__.startswith(str(known["torch"]).split("+")[0])
    assert {"click", "tabulate", "torchvision", "cuda", "cudnn", "driver"} <= set(known)
    assert len(load_average() or (0, 0, 0)) == 3


def told(answer: object) -> Callable[..., object]:
    """Make a driver function that reports everything about the first GPU, and only the handle of the second."""

    def ask(gpu: str = "", which: object = None) -> object:
        if gpu == "two":
            raise RuntimeError("not supported")
        return answer[which] if isinstance(answer, dict) else answer

    return ask


DRIVER = SimpleNamespace(
    __spec__=None,  # Python 3.13 asks for it
    nvmlInit=told(None),
    nvmlSystemGetDriverVersion=told("575.57.08"),
    nvmlDeviceGetHandleByUUID={"GPU-0a-1": "one", "GPU-0a-2": "two"}.__getitem__,
    nvmlDeviceGetMaxClockInfo=told({1: 1980, 2: 2619}),
    nvmlDeviceGetPowerManagementLimit=told(700_000),
    nvmlDeviceGetMaxPcieLinkGeneration=told(5),
    nvmlDeviceGetMaxPcieLinkWidth=told(16),
    nvmlDeviceGetNvLinkState=told({link: int(link < 2) for link in range(36)}),
)
KNOWN = Gpu("NVIDIA H200", 1 << 37, 1980.0, 2619.0, 700.0, "PCIe 5.0 x16, 2 x NVLink")
UNKNOWN = Gpu("NVIDIA H200", 1 << 37)


@pytest.mark.parametrize("driver", [DRIVER, None], ids=["driver", "no Python bindings"])
def test_what_the_driver_tells(driver: SimpleNamespace | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def properties(i: int) -> SimpleNamespace:
        return SimpleNamespace(name="NVIDIA H200", total_memory=1 << 37, uuid=f"0a-{i + 1}")

    monkeypatch.setitem(sys.modules, "pynvml", driver)
    assert versions()["driver"] == ("575.57.08" if driver else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    assert machine().gpus == [KNOWN if driver else UNKNOWN, UNKNOWN]


@pytest.mark.parametrize(
    ("have", "cuda", "kind", "count", "expected"),
    [
        (2, 0, None, None, Devices("cpu", 2, 1)),
        (2, 4, "cpu", 1, Devices("cpu", 1, 2)),
        (16, 0, "cpu", None, Devices("cpu", 8, 2)),
        (8, 0, "cpu", 9, "--devices 9: a CPU device is at least one core and this machine offers 8; use at most 8"),
        (2, 4, None, None, Devices("cuda", 4)),
        (2, 0, "cuda", None, "--on cuda: this machine has no CUDA device that PyTorch can use; use --on cpu"),
        (2, 2, None, 3, "--devices 3: this machine has 2 CUDA device(s); use at most 2"),
        (2, 0, "meta", None, Devices("meta", MOST_DEVICES)),
        (2, 0, "meta", 3, Devices("meta", 3)),
    ],
)
def test_devices_that_are_found(
    have: int, cuda: int, kind: str | None, count: int | None, expected: Devices | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reproduce.machine.devices, "cores", lambda: have)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
    if isinstance(expected, Devices):
        assert find_devices(kind, count) == expected
    else:
        with pytest.raises(Error) as caught:
            find_devices(kind, count)
        assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("devices", "text", "first"),
    [
        (Devices("cpu", 1, 1), "1 CPU device of 1 thread", ["cpu", "cpu"]),
        (Devices("cpu", 2, 4), "2 CPU devices of 4 threads each", ["cpu", "cpu"]),
        (Devices("cuda", 1), "1 CUDA device", ["cuda:0", "cuda:0"]),  # the first one stands for all
        (Devices("cuda", 8), "8 CUDA devices", ["cuda:0", "cuda:1"]),
        (Devices("meta", 3), "3 devices that hold no data (meta)", ["meta", "meta"]),
    ],
)
def test_what_they_are(devices: Devices, text: str, first: list[str]) -> None:
    assert str(devices) == text
    assert devices.first(2) == [torch.device(name) for name in first]


def test_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert Devices("meta", 3).memory is None
    (tmp_path / "meminfo").write_text("MemTotal:  9 kB\nMemAvailable:       7340032 kB\n")
    monkeypatch.setattr(reproduce.machine.devices, "MEMORY", tmp_path / "meminfo")
    assert Devices("cpu", 2, 1).memory == 7 << 30
    monkeypatch.setattr(reproduce.machine.devices, "MEMORY", tmp_path / "none")
    assert Devices("cpu", 2, 1).memory is None


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000\n", 4), ("1600000 100000\n", 4), ("250000 100000\n", 2), ("50000 100000\n", 1), ("", 4), (None, 4)],
)
def test_cores_are_bounded_by_a_containers_quota(
    quota: str | None, expected: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(reproduce.machine.devices, "CPU_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    assert cores() == expected


PROGRAM = """
import json, os, sys
print("started", file=sys.stderr)
from reproduce.machine.allocator import keep_freed_memory
keep_freed_memory()
print(json.dumps([sys.argv[1:], {name: value for name, value in os.environ.items() if name.startswith("MALLOC_")}]))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")
@pytest.mark.parametrize(
    ("given", "starts", "found"),
    [
        ({}, 2, KEEP_FREED),
        ({"MALLOC_TOP_PAD_": "1"}, 1, {"MALLOC_TOP_PAD_": "1"}),
        ({"MALLOC_ARENA_MAX": "2"}, 2, {"MALLOC_ARENA_MAX": "2", **KEEP_FREED}),
    ],
    ids=["nothing", "one of them", "something else"],
)
def test_starts_over_once(given: dict[str, str], starts: int, found: dict[str, str]) -> None:
    own = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", PROGRAM, "--an", "option"]
    environment = {**own, **given, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [["--an", "option"], found]
    assert done.stderr.count("started") == starts


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Make a repository with two revisions, `old` and HEAD, and beside it `shallow`, a clone of HEAD only."""
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


def test_git_dir_of_the_environment_is_not_used(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
