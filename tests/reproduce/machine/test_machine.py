"""The description of machine and checkout in records is true; missing devices or revisions are one-line errors."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import reproduce.machine.devices
import torchgpipe
from reproduce.error import Error
from reproduce.machine.allocator import KEEP_FREED
from reproduce.machine.description import ROOT, Gpu, load_average, machine, versions
from reproduce.machine.devices import MOST_DEVICES, Devices, cores, find_devices
from reproduce.machine.git import Git, checkout, commit_of
from reproduce.machine.load import Load, other_runs, too_busy

from ..made import commit
from ..made import git as run


def test_this_machine() -> None:
    found = machine()
    assert 1 <= found.cores <= found.cores_installed == os.cpu_count()
    assert found.cpu and found.system.startswith(platform.system())
    assert found.memory is None or found.memory > 2**28
    assert len(found.gpus) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    known = versions()
    assert (known["python"], known["torchgpipe"]) == (
        platform.python_version(),
        torchgpipe.__version__,
    )
    assert torch.__version__.startswith(str(known["torch"]).split("+")[0])
    assert {"click", "tabulate", "torchvision", "cuda", "cudnn", "driver"} <= set(known)
    assert len(load_average() or (0, 0, 0)) == 3


COMMANDS = {  # of processes with these numbers, and their parents; 0 is this one
    0: (1, "python -m reproduce run x"),
    70: (0, "python -m reproduce run y"),
    71: (1, "time python -m reproduce run"),
    72: (71, "/bin/python3 -W ignore -m reproduce run x --all"),
    74: (1, "python -m reproduce show x"),
    75: (1, "python -m benchmarks.gates.counts"),
    76: (1, "/bin/python3 /bin/reproduce regression --base x"),
    77: (1, "/bin/python3 /bin/benchmarks.py x"),
}


@pytest.mark.parametrize(
    ("have", "others"), [(2, 0.1), (1, 0.0)]
)  # a quota leaves a core to others
def test_what_others_have_of_the_machine(
    have: int, others: float, tmp_path: Path, monkeypatch: Any
) -> None:
    def at(seconds: float, stat: str, own: int, waited: int) -> None:
        """Write what Linux says. `own` are ticks of CPU time of this process, and of its child."""
        monkeypatch.setattr(
            "reproduce.machine.load.time", SimpleNamespace(monotonic=lambda: seconds)
        )
        lines = [f"cpu{core} {stat} 7 7" for core in range(3)]  # this program may use two of three
        files = {
            "stat": "\n".join(["cpu 0", *lines, "intr 1"]),
            "pressure/cpu": f"some avg10=0 total={waited}\nx",
        }
        for pid, (parent, command) in COMMANDS.items():
            used = 10**6 if pid > 70 else own
            line = f"(a) b) S {parent or os.getpid()} 0 0 0 0 0 0 0 0 0 {used} 0 0 0 0"
            files |= {f"{pid or os.getpid()}/stat": line}
            files |= {f"{pid or os.getpid()}/cmdline": "\0".join([*command.split(), ""])}
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)

    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr("os.sysconf", lambda _: 100)
    monkeypatch.setattr("reproduce.machine.load.cores", lambda: have)
    monkeypatch.setattr("reproduce.machine.load.PROC", tmp_path)
    load = Load()
    at(5.0, "0 0 0 900 900 0 0 0", 0, 0)
    load.begin()
    at(5.5, "50 0 0 900 900 0 0 0", 0, 0)
    assert load.round() == {}, "too short"
    at(7.0, "100 20 10 900 900 10 10 4", 130, 500_000)  # 3 s, 2.6 of them ours
    known = {"others": others, "stolen": 0.04 / have, "pressure": 0.25}
    assert load.round() == known and too_busy(known) == (have == 1), (
        "too much was stolen from one core"
    )
    at(7.5, "100 20 10 900 900 10 10 4", 130, 500_000)
    assert load.round()["pressure"] == 0.2, (
        "a short round is judged together with the one before it"
    )
    others_run = [
        "reproduce run x --all",
        "benchmarks.gates.counts",
        "reproduce regression --base x",
    ]
    assert other_runs() == dict(zip((72, 75, 76), others_run, strict=True))


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
def test_what_the_driver_tells(
    driver: SimpleNamespace | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def properties(i: int) -> SimpleNamespace:
        return SimpleNamespace(name="NVIDIA H200", total_memory=1 << 37, uuid=f"0a-{i + 1}")

    monkeypatch.setitem(sys.modules, "pynvml", driver)
    assert versions()["driver"] == ("575.57.08" if driver else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    assert machine().gpus == [KNOWN if driver else UNKNOWN, UNKNOWN]


CPUS, CUDA, LEAST = "CPU devices of", "CUDA devices", "a CPU device is at least one core"


@pytest.mark.parametrize(
    ("have", "cuda", "kind", "count", "expected", "said"),
    [
        (1, 0, None, None, Devices("cpu", 1, 1), "1 CPU device of 1 thread"),
        (2, 0, None, None, Devices("cpu", 2, 1), f"2 {CPUS} 1 thread each"),
        (2, 4, "cpu", 1, Devices("cpu", 1, 2), "1 CPU device of 2 threads"),
        (16, 0, "cpu", None, Devices("cpu", 8, 2), f"8 {CPUS} 2 threads each"),
        (8, 0, "cpu", 9, None, f"--devices 9: {LEAST} and this machine offers 8; use at most 8"),
        (2, 1, None, None, Devices("cuda", 1), "1 CUDA device"),  # the first one stands for all
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
    monkeypatch.setattr(reproduce.machine.devices, "cores", lambda: have)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
    try:
        found = find_devices(kind, count)
    except Error as error:
        assert expected is None and str(error) == said
    else:
        first = (
            [f"cuda:{k}" for k in (0, int(found.count > 1))]
            if found.kind == "cuda"
            else [found.kind] * 2
        )
        assert (found, str(found)) == (expected, said)
        assert found.first(2) == [*map(torch.device, first)]


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
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(reproduce.machine.devices, "CPU_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    assert cores() == expected
    monkeypatch.setattr(reproduce.machine.devices, "MEMORY", tmp_path / "meminfo")
    assert Devices("meta", 3).memory is None and Devices("cpu", 2, 1).memory is None
    (tmp_path / "meminfo").write_text("MemTotal:  9 kB\nMemAvailable:       7340032 kB\n")
    assert Devices("cpu", 2, 1).memory == 7 << 30


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
    assert checkout(root) == Git(head, dirty=False), (
        "a file that git does not know, such as a record, is no source"
    )
    names = []
    for text in ("edited", "otherwise", "edited"):
        (root / "file").write_text(text)
        found = checkout(root)
        assert (
            found is not None
            and found.dirty
            and found.changes
            and found.name(7) == f"{head[:7]}+{found.changes}"
        )
        names.append(found.name(7))
    assert names[0] == names[2] != names[1], "two different changes are not the same revision"


def test_no_checkout_is_none(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checkout(tmp_path) is None
    (root / "venv").mkdir()
    assert checkout(root / "venv") is None, "another project's, which has this one installed"
    run(tmp_path, "init")
    assert checkout(tmp_path) is None, "no commit"
    old = run(root, "rev-parse", "old")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    assert commit_of(root, "old") == old, "the folder counts, not what the environment says"
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
            "^old: this clone is shallow and does not hold it; run 'git fetch --unshallow' first$",
        ),
        (".", "HEAD", r"^HEAD: .* cannot be used as a git checkout \(.*not a git repository"),
    ],
)
def test_a_revision_that_is_not_there(
    folder: str, revision: str, said: str, root: Path, tmp_path: Path
) -> None:
    with pytest.raises(Error, match=said):
        commit_of(tmp_path / folder, revision)
