"""Tests of several measurements of `python -m benchmarks.gpu`.

They measure the machine, the overhead of the library, and compiled layers. The whole command also
runs once on the CPU, at a tiny size. On a GPU, it runs the same code.
"""

import json
import subprocess
import sys
from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.gpu import compiled, issued, machine, machinery
from benchmarks.gpu.frame.command import PAGE
from benchmarks.gpu.issued import Call, covered, summed_up
from benchmarks.gpu.part import PARTS, RESULT, Context
from reproduce.machine.description import ROOT
from reproduce.records.record import load

OLD = """
from torch import nn
GPipe = lambda layers, balance, **_: nn.Sequential(*layers)
"""


@pytest.mark.slow
def test_dry_run(tmp_path: Path) -> None:
    """Check that the whole command finishes all measurements, at a tiny size on the CPU.

    Some measurements compare the library with another version of it, here a package that the test
    writes.
    """
    package = tmp_path / "other" / "torchgpipe"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(OLD)
    (package / "__version__.py").write_text("__version__ = '0.0.1'")
    out = tmp_path / "out"
    options = ["--dry-run", "--out", str(out), "--against", str(package.parent)]

    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *options], cwd=ROOT, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stdout + done.stderr
    said = (out / PAGE).read_text()
    assert done.stdout.endswith(said)
    for name in PARTS:
        assert f"- **{name}** (finished" in said
    assert len(said.splitlines()) <= 40
    emulated = json.loads((out / "emulated" / RESULT).read_text())
    assert emulated["tables"] and "failed" not in emulated
    found = json.loads((out / "machinery" / RESULT).read_text())
    for ways in found["cases"].values():
        assert set(ways) == {"plain loop", "this library", "other"}
        for values in ways.values():
            assert values["host"] > 0
    record = load(out / "records" / "gpu-machinery.json")
    assert len(record.results) == 3 * found["planned"]
    versions = {result.config["version"] for result in record.results if result.row == "other"}
    assert versions == {"torchgpipe 0.0.1"}


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], 0),
        ([(0, 3), (5, 6)], 4),
        ([(5, 9), (0, 3), (1, 2)], 7),
        ([(0, 4), (2, 6), (6, 7)], 7),
    ],
)
def test_work_at_the_same_time_counts_once(spans: list[tuple[int, int]], expected: int) -> None:
    assert covered(spans) == expected


NONE = "the profiler has recorded no"
SYNC = ("cudaDeviceSynchronize", False, 90, 99)
STEP: list[Call] = [
    ("cudaLaunchKernel", False, 0, 1),
    ("kernel", True, 1, 5),
    ("cudaStreamSynchronize", False, 5, 7),  # of `Tensor.item` and `Stream.synchronize`
    ("cudaEventSynchronize", False, 7, 8),
    ("cudaEventQuery", False, 8, 9),  # it does not wait
    ("cudaMemcpyAsync", False, 9, 10),
    ("Memcpy DtoH", True, 10, 12),
    SYNC,
]


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        (STEP, {"busy": 3e-9, "waits": 2}),
        ([*STEP, SYNC], {"busy": 3e-9, "waits": 3}),
        (
            [STEP[1]],
            {"busy": 2e-9, "failed": "the profiler has recorded no calls of CUDA by the host"},
        ),
        ([SYNC], {"waits": 0, "failed": "the profiler has recorded no work of the device"}),
    ],
)
def test_waits_are_those_that_the_profiler_does_not_make_itself(
    calls: list[Call], expected: dict[str, Any]
) -> None:
    assert summed_up(calls, nothing=[SYNC], tasks=2) == expected


class Broken:
    """A step that fails when it is profiled."""

    issue = drop_gradients = int


def test_a_profile_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("no GPU\nin here")

    monkeypatch.setattr("torch.accelerator.synchronize", fail)
    step: Any = Broken()
    assert issued._profile(step) == {"failed": "RuntimeError: no GPU"}


class Kineto:
    """A stand-in for PyTorch's profiler, which reports made-up calls of CUDA.

    If a step has run, these are the calls in `STEP`. Otherwise, the only call is `SYNC`, which
    the profiler itself makes.
    """

    issued = False
    recordings = 0

    def __init__(self, activities: list[Any]) -> None:
        assert activities == [torch.profiler.ProfilerActivity.CUDA]
        self.profiler = SimpleNamespace(kineto_results=SimpleNamespace(events=self.events))

    def __enter__(self) -> "Kineto":
        Kineto.issued = False
        Kineto.recordings += 1
        return self

    def __exit__(self, *error: object) -> None:
        self.calls = STEP if Kineto.issued else [SYNC]

    def events(self) -> list[Any]:
        events = []
        for name, on_device, start, end in self.calls:
            kind = issued.DEVICE if on_device else type(issued.DEVICE).CPU
            told = {
                "name": name,
                "device_type": kind,
                "start_ns": start,
                "duration_ns": end - start,
            }
            getters = {key: lambda value=value: value for key, value in told.items()}
            events.append(SimpleNamespace(**getters))
        return events


def test_a_profile_counts_waits_and_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that calls of CUDA which the profiler itself makes are not counted as those of a step.

    To know the profiler's own calls, the benchmark once records a profile in which nothing runs.
    """
    monkeypatch.setattr(issued, "profile", Kineto)
    monkeypatch.setattr(Kineto, "recordings", 0)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.accelerator, name, lambda: None)

    def issue() -> None:
        Kineto.issued = True

    step: Any = SimpleNamespace(issue=issue, drop_gradients=lambda: None, tasks=2)
    issued._recorded_of_nothing.cache_clear()
    try:
        for _ in range(2):
            assert issued._profile(step) == {"busy": 3e-9, "waits": 2}
    finally:
        issued._recorded_of_nothing.cache_clear()
    assert Kineto.recordings == 2 + 2


# What `benchmarks.gpu.issued` prints of a case on a GPU. The times are in seconds per task.
LINE = {
    "case": "linear n=2 m=8 never",
    "samples": {
        "plain loop": [[[2e-5, 4e-5, 3e-5]], [[4e-5, 8e-5, 7e-5]]],
        "this library": [[[5e-5, 9e-5, 8e-5], [7e-5, 9e-5, 8e-5]]],
    },
    "profiles": {
        "plain loop": [{"waits": 0, "busy": 2e-5}],
        "this library": [{"waits": 3, "failed": "no work of the device"}],
    },
    "unable": {"other": "ImportError: gone"},
    "not profiled": {"plain loop": "RuntimeError: too late"},
}


def test_a_device_is_idle_when_it_has_no_kernel() -> None:
    found = machinery._found(LINE)
    plain = found["plain loop"]
    assert plain["host"] == pytest.approx(30)
    assert plain["step"] == pytest.approx(60)
    assert plain["idle"] == pytest.approx(50 - 20)
    assert "idle" not in found["this library"]  # the profiler recorded nothing
    assert found["other"] == {"reason": "ImportError: gone"}


def _result(found: dict[str, Any], name: str = str(LINE["case"])) -> dict[str, Any]:
    versions = ["torchgpipe 0.1.0", "torchgpipe 0.0.7"]
    faults = machinery.faults(name, found)
    return {"planned": 4, "versions": versions, "cases": {name: found}, "faults": faults}


def test_a_wait_for_the_device_is_a_fault() -> None:
    result = _result(machinery._found(LINE))

    first, last = machinery.lines(result)

    assert result["faults"] == ["linear n=2 m=8 never (3 a step)"]
    assert first.startswith(
        "linear, us a task, medians over cases (1): issued by the host in plain"
    )
    assert "device idle for plain loop 30" in first
    fault = "**FAULT: this library makes the host wait for the device, in linear n=2 m=8 never "
    assert last.startswith(f"{fault}(3 a step)**; 1 of 4 cases; failed: other in linear n=2 m=8 ")
    assert "never (ImportError: gone), " in last
    assert "profile of plain loop in linear n=2 m=8 never (RuntimeError: too late), " in last
    assert last.endswith("profile of this library in linear n=2 m=8 never (no work of the device)")


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (
            {"plain loop": {"waits": 7}, "this library": {"waits": 0}},
            "this library never makes the host wait for the device, in 1 cases; 1 of 4 cases",
        ),
        (
            {"this library": {"host": 1.0}},
            "whether this library makes the host wait for the device was not counted; 1 of 4 cases",
        ),
    ],
)
def test_only_waits_of_this_library_are_faults(found: dict[str, Any], expected: str) -> None:
    result = _result(found)
    assert result["faults"] == []
    assert machinery.lines(result)[-1] == expected


def test_the_page_names_the_first_faults() -> None:
    result = _result({"this library": {"waits": 1}})
    result["faults"] = ["a", "b", "c", "d", "e"]
    assert "in a, b, c and 2 more**; " in machinery.lines(result)[-1]


def context(folder: Path) -> Context:
    return Context("a part", "tiny", folder, deadline=0.0)


def test_copies_within_a_device_count_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "seconds_of", lambda work, device: 0.5)
    result = machine.run(replace(context(tmp_path), deadline=inf))
    assert result["copies"] == {"within cpu": 2 * 4 * 2**18 / 0.5}


def test_what_compiled_layers_gain_is_a_ratio_of_steps() -> None:
    off, on = {"host": 0.04, "step": 0.06}, {"host": 0.01, "step": 0.03}
    row = {"off": off, "on": on, "of": 24, "done": 20, "seconds": 31.4}
    rows = {"torch.compile": row, "CUDA graphs": {"reason": "RuntimeError: no graph"}}
    first, last = compiled.lines({"rows": rows, "left out": ["all else"]})
    assert "a step is 2.00 times as fast, the host's time goes from 40.0 to 10.0 ms" in first
    assert first.endswith("made in 31 s / CUDA graphs: failed (RuntimeError: no graph)")
    assert last == "left out: all else"


@pytest.mark.slow
def test_all_layers_are_compiled_although_they_share_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that all layers are compiled, even if PyTorch's limit of recompilations is one.

    Three linear layers of different shapes share their code, and so need three compiled versions.
    """

    def build() -> tuple[nn.Sequential, Tensor]:
        layers = [nn.Linear(width, width + 1) for width in (2, 3, 4)]
        return nn.Sequential(*layers), torch.rand(compiled.CHUNKS, 2)

    def versions(graph: Any, inputs: Any) -> Any:
        made.append(graph)
        return graph.forward

    made: list[Any] = []
    dynamo = torch._dynamo.config
    with dynamo.patch(recompile_limit=1, fail_on_recompile_limit_hit=False):
        monkeypatch.setattr(compiled, "RESERVE", -inf)
        found = compiled._with_compiled(build, torch.device("cpu"), versions, context(tmp_path))

    assert found["done"] == 3
    assert len(made) == 3
