"""Tests that records describe the machine and the git checkout correctly.

A missing device or git revision must lead to an error of one line.
"""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import torchgpipe
from reproduce.error import Error
from reproduce.machine import devices, driver
from reproduce.machine.allocator import KEEP_FREED
from reproduce.machine.description import ROOT, Gpu, load_average, machine, versions
from reproduce.machine.devices import MOST_DEVICES, Devices, cores, find_devices
from reproduce.machine.git import Git, checkout, commit_of
from reproduce.machine.load import Load, other_runs, too_busy

from ..made import commit
from ..made import git as run
from .nvml import Nvml


def test_this_machine() -> None:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found, known = machine(), versions()
    assert 1 <= found.cores <= found.cores_installed
    assert found.cores_installed == os.cpu_count()
    assert found.cpu
    assert found.system.startswith(platform.system())
    assert found.memory is None or found.memory > 2**28
    assert len(found.gpus) == gpus
    assert known["python"] == platform.python_version()
    assert known["torchgpipe"] == torchgpipe.__version__
    release, _, _ = str(known["torch"]).partition("+")
    assert torch.__version__.startswith(release)
    assert {"click", "tabulate", "torchvision", "cuda", "cudnn", "driver"} <= set(known)
    assert len(load_average() or (0, 0, 0)) == 3


# For each process id: the parent's id, and the command. The id 0 stands for this process.
COMMANDS = {
    0: (1, "python -m reproduce run x"),
    70: (0, "python -m reproduce run y"),
    71: (1, "time python -m reproduce run"),
    72: (71, "/bin/python3 -W ignore -m reproduce run x --all"),
    74: (1, "python -m reproduce show x"),
    75: (1, "python -m benchmarks.gates.counts"),
    76: (1, "/bin/python3 /bin/reproduce regression --base x"),
    77: (1, "/bin/python3 /bin/benchmarks.py x"),
}


# On a machine with two cores, a quota of one core leaves the second core to other programs.
@pytest.mark.parametrize(("have", "others"), [(2, 0.1), (1, 0.0)])
def test_what_others_have_of_the_machine(
    have: int, others: float, tmp_path: Path, monkeypatch: Any
) -> None:
    def at(seconds: float, stat: str, own: int, waited: int) -> None:
        """Set a fake clock, and write fake files of /proc as they are at this time.

        Args:
            seconds: The time of the clock.
            stat: The numbers of a core in `/proc/stat`, which are the same for all three cores.
            own: The CPU time of this process, and also of its child, in ticks of 10 ms.
            waited: The microseconds during which some process waited for a core.
        """
        clock = SimpleNamespace(monotonic=lambda: seconds)
        monkeypatch.setattr("reproduce.machine.load.time", clock)
        cores = "\n".join(f"cpu{core} {stat} 7 7" for core in range(3))
        files = {
            "stat": f"cpu 0\n{cores}\nintr 1",
            "pressure/cpu": f"some avg10=0 total={waited}\nx",
        }
        for number, (parent, command) in COMMANDS.items():
            used = 10**6 if number > 70 else own
            pid, parent_id = number or os.getpid(), parent or os.getpid()
            files[f"{pid}/stat"] = f"(a) b) S {parent_id} 0 0 0 0 0 0 0 0 0 {used} 0 0 0 0"
            files[f"{pid}/cmdline"] = command.replace(" ", "\0") + "\0"
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)

    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr("os.sysconf", lambda _: 100)
    monkeypatch.setattr("reproduce.machine.load.cores", lambda: have)
    monkeypatch.setattr("reproduce.machine.load.PROC", tmp_path)
    load = Load()
    at(5.0, "0 0 0 900 900 0 0 0", 0, 0)
    load.begin()
    at(5.5, "50 0 0 900 900 0 0 0", 0, 0)
    assert load.round() == {}, "too short"
    at(7.0, "100 20 10 900 900 10 10 4", 130, 500_000)  # cores worked 3 s, of which 2.6 s are ours
    known = {"others": others, "stolen": 0.04 / have, "pressure": 0.25}
    assert load.round() == known
    assert too_busy(known) == (have == 1), "too much was stolen from one core"
    at(7.5, "100 20 10 900 900 10 10 4", 130, 500_000)
    assert load.round()["pressure"] == 0.2, "a short round is judged together with its predecessor"
    assert other_runs() == {
        72: "reproduce run x --all",
        75: "benchmarks.gates.counts",
        76: "reproduce regression --base x",
    }


FIRST, SECOND = 0x7F0000000010, 0x7F0000000020
"""The addresses of NVML's objects for two GPUs. The second GPU tells nothing."""
NVML = Nvml(
    {
        "nvmlDeviceGetHandleByUUID": {b"GPU-0a-1": FIRST, b"GPU-0a-2": SECOND}.__getitem__,
        "nvmlDeviceGetMaxClockInfo": lambda gpu, kind: {FIRST: {1: 1980, 2: 2619}}[gpu][kind],
        "nvmlDeviceGetPowerManagementLimit": {FIRST: 700_000}.__getitem__,
        "nvmlDeviceGetMaxPcieLinkGeneration": {FIRST: 5}.__getitem__,
        "nvmlDeviceGetMaxPcieLinkWidth": {FIRST: 16}.__getitem__,
        "nvmlDeviceGetNvLinkState": lambda gpu, link: {FIRST: link < 2}[gpu],
    }
)
KNOWN = Gpu("NVIDIA H200", 1 << 37, 1980.0, 2619.0, 700.0, "PCIe 5.0 x16, 2 x NVLink")
UNKNOWN = Gpu("NVIDIA H200", 1 << 37)


@pytest.mark.parametrize("nvml", [NVML, None], ids=["driver", "no driver"])
def test_what_the_driver_tells(nvml: Nvml | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def properties(i: int) -> SimpleNamespace:
        return SimpleNamespace(name="NVIDIA H200", total_memory=1 << 37, uuid=f"0a-{i + 1}")

    monkeypatch.setattr(driver, "_nvml", lambda: nvml)
    version, first = (None, UNKNOWN) if nvml is None else ("575.57.08", KNOWN)
    assert versions()["driver"] == version
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    assert machine().gpus == [first, UNKNOWN]


CPUS, CUDA, LEAST = "CPU devices of", "CUDA devices", "a CPU device needs at least one core"


@pytest.mark.parametrize(
    ("have", "cuda", "kind", "count", "expected", "said"),
    [
        (1, 0, None, None, Devices("cpu", 1, 1), "1 CPU device of 1 thread"),
        (2, 0, None, None, Devices("cpu", 2, 1), f"2 {CPUS} 1 thread each"),
        (2, 4, "cpu", 1, Devices("cpu", 1, 2), "1 CPU device of 2 threads"),
        (16, 0, "cpu", None, Devices("cpu", 8, 2), f"8 {CPUS} 2 threads each"),
        (8, 0, "cpu", 9, None, f"--devices 9: {LEAST}, and this machine has 8; use at most 8"),
        (2, 1, None, None, Devices("cuda", 1), "1 CUDA device"),  # it stands for all devices
        (2, 4, None, None, Devices("cuda", 4), f"4 {CUDA}"),
        (
            2,
            0,
            "cuda",
            None,
            None,
            "--on cuda: this machine has no CUDA device that PyTorch can use; use --on cpu",
        ),
        (2, 2, None, 3, None, "--devices 3: this machine has 2 CUDA device(s); use at most 2"),
        (
            2,
            0,
            "meta",
            None,
            Devices("meta", MOST_DEVICES),
            f"{MOST_DEVICES} devices that hold no data (meta)",
        ),
        (2, 0, "meta", 3, Devices("meta", 3), "3 devices that hold no data (meta)"),
    ],
)
def test_devices_that_are_found(
    have: int,
    cuda: int,
    kind: str | None,
    count: int | None,
    expected: Devices | None,
    said: str,
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(devices, "cores", lambda: have)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
    try:
        found = find_devices(kind, count)
    except Error as error:
        assert expected is None
        assert str(error) == said
    else:
        assert found == expected
        assert str(found) == said
        first, second = found.kind, found.kind
        if found.kind == "cuda":
            first, second = "cuda:0", "cuda:1" if found.count > 1 else "cuda:0"
        assert found.first(2) == [torch.device(first), torch.device(second)]


@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        ("max 100000\n", 4),
        ("1600000 100000\n", 4),
        ("250000 100000\n", 2),
        ("50000 100000\n", 1),
        ("", 4),
        (None, 4),
    ],
)
def test_cores_are_bounded_by_a_containers_quota_and_memory_is_what_is_free(
    quota: str | None, expected: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    quota_file, memory_file = tmp_path / "cpu.max", tmp_path / "meminfo"
    if quota is not None:
        quota_file.write_text(quota)
    monkeypatch.setattr(devices, "CPU_QUOTA", quota_file)
    monkeypatch.setattr(devices, "MEMORY", memory_file)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    assert cores() == expected
    assert Devices("meta", 3).memory is None
    assert Devices("cpu", 2, 1).memory is None
    memory_file.write_text("MemTotal:  9 kB\nMemAvailable:       7340032 kB\n")
    assert Devices("cpu", 2, 1).memory == 7 << 30


PROGRAM = """
import json, os, sys
print("started", file=sys.stderr)
from reproduce.machine.allocator import keep_freed_memory
keep_freed_memory()
settings = {name: value for name, value in os.environ.items() if name.startswith("MALLOC_")}
print(json.dumps([sys.argv[1:], settings]))
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
    """Make a git repository with two revisions, which are tagged `old` and `new`.

    The folder `shallow` next to the repository is a clone that has only the newer revision.
    """
    root = tmp_path / "root"
    root.mkdir()
    for tag in ("old", "new"):
        (root / "file").write_text(tag)
        commit(root, tag)
    run(tmp_path, "clone", "--quiet", "--depth", "1", root.as_uri(), "shallow")
    return root


def test_checkout(root: Path) -> None:
    head = run(root, "rev-parse", "HEAD")
    clean = Git(head, dirty=False)
    assert checkout(root) == clean
    (root / "record.json").write_text("{}")
    assert checkout(root) == clean, "a file that git does not know, such as a record, is no source"
    names = []
    for text in ("edited", "otherwise", "edited"):
        (root / "file").write_text(text)
        found = checkout(root)
        assert found is not None
        assert found.dirty
        assert found.changes
        name = found.name(7)
        assert name == f"{head[:7]}+{found.changes}"
        names.append(name)
    edited, otherwise, again = names
    assert edited == again
    assert edited != otherwise, "two different changes are not the same revision"


def test_no_checkout_is_none(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checkout(tmp_path) is None
    (root / "venv").mkdir()
    assert checkout(root / "venv") is None, "the checkout may be of another project"
    run(tmp_path, "init")
    assert checkout(tmp_path) is None, "no commit"
    old = run(root, "rev-parse", "old")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    assert commit_of(root, "old") == old, "the folder counts, not the environment variable"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert checkout(root) is None, "no git"
    with pytest.raises(Error, match="git is not installed"):
        commit_of(root, "HEAD")


@pytest.mark.parametrize(
    ("folder", "revision", "said"),
    [
        (
            "root",
            "nowhere",
            "^nowhere: no such git revision here; name a commit, a branch or a tag$",
        ),
        ("root", "--help", "^--help: no such git revision here"),
        ("root", "", "^: no such git revision here"),
        (
            "shallow",
            "old",
            "^old: this clone is shallow and does not have this revision; "
            "run 'git fetch --unshallow' first$",
        ),
        (".", "HEAD", r"^HEAD: .* cannot be used as a git checkout \(.*not a git repository"),
    ],
)
def test_a_revision_that_is_not_there(
    folder: str, revision: str, said: str, root: Path, tmp_path: Path
) -> None:
    with pytest.raises(Error, match=said):
        commit_of(tmp_path / folder, revision)
