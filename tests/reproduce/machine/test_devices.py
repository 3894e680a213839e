"""Devices: a CPU device is an equal share of the cores; nobody gets more devices than there are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import reproduce.machine.devices
from reproduce.error import Error
from reproduce.machine.devices import MOST_DEVICES, Devices, cores, find_devices


@pytest.mark.parametrize(
    ("have", "cuda", "kind", "count", "expected"),
    [
        (1, 0, "cpu", None, Devices("cpu", 1, 1)),
        (2, 0, None, None, Devices("cpu", 2, 1)),
        (2, 4, "cpu", 1, Devices("cpu", 1, 2)),
        (4, 0, "cpu", 3, Devices("cpu", 3, 1)),
        (16, 0, "cpu", None, Devices("cpu", 8, 2)),
        (96, 0, "cpu", 96, Devices("cpu", 96, 1)),
        (8, 0, "cpu", 9, "--devices 9: a CPU device is at least one core and this machine offers 8; use at most 8"),
        (2, 4, None, None, Devices("cuda", 4)),
        (2, 4, "cuda", 2, Devices("cuda", 2)),
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
        (Devices("cuda", 1), "1 CUDA device", ["cuda:0", "cuda:0"]),  # the first plays all
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


def test_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    with Devices("cpu", 1, threads=before + 1).in_use():
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


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
