"""Devices: a CPU device is an equal share of the cores; nobody gets more devices than there are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import reproduce.machine.devices
from reproduce.error import Error
from reproduce.machine.devices import MOST_DEVICES, Devices, cores, cpu_quota, find_devices


@pytest.mark.parametrize(
    ("have", "asked", "devices", "threads"),
    [
        (1, None, 1, 1),
        (2, None, 2, 1),
        (2, 1, 1, 2),
        (4, 3, 3, 1),
        (6, None, 6, 1),
        (8, 4, 4, 2),
        (16, None, 8, 2),
        (96, None, 8, 12),
        (96, 96, 96, 1),
    ],
)
def test_cpu_devices_share_the_cores(
    have: int, asked: int | None, devices: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reproduce.machine.devices, "cores", lambda: have)
    assert find_devices("cpu", asked) == Devices("cpu", devices, threads)


@pytest.mark.parametrize(("have", "asked"), [(1, 2), (2, 3), (8, 9)])
def test_more_devices_than_cores_are_refused(have: int, asked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproduce.machine.devices, "cores", lambda: have)
    with pytest.raises(Error) as caught:
        find_devices("cpu", asked)
    assert f"--devices {asked}: a CPU device is at least one core" in str(caught.value)
    assert str(caught.value).endswith(f"use at most {have}")


@pytest.mark.parametrize(
    ("cuda", "kind", "count", "expected"),
    [
        (4, None, None, Devices("cuda", 4)),
        (4, "cuda", 2, Devices("cuda", 2)),
        (4, "cpu", 1, Devices("cpu", 1, 2)),
        (0, None, None, Devices("cpu", 2, 1)),
        (0, "cuda", None, "--on cuda: this machine has no CUDA device that PyTorch can use; use --on cpu"),
        (2, None, 3, "--devices 3: this machine has 2 CUDA device(s); use at most 2"),
    ],
)
def test_cuda_devices_are_taken_where_there_are_any(
    cuda: int, kind: str | None, count: int | None, expected: Devices | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reproduce.machine.devices, "cores", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
    if isinstance(expected, Devices):
        assert find_devices(kind, count) == expected
    else:
        with pytest.raises(Error) as caught:
            find_devices(kind, count)
        assert str(caught.value) == expected


def test_first_devices() -> None:
    assert Devices("cpu", 4, 1).first(2) == [torch.device("cpu")] * 2
    assert Devices("cuda", 4).first(2) == [torch.device("cuda:0"), torch.device("cuda:1")]


@pytest.mark.parametrize(
    ("devices", "text"),
    [
        (Devices("cpu", 1, 1), "1 CPU device of 1 thread"),
        (Devices("cpu", 2, 4), "2 CPU devices of 4 threads"),
        (Devices("cuda", 1), "1 CUDA device"),
        (Devices("cuda", 8), "8 CUDA devices"),
    ],
)
def test_reads_well(devices: Devices, text: str) -> None:
    assert str(devices) == text


def test_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    with Devices("cpu", 1, threads=before + 1).in_use():
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("content", "quota"), [("max 100000\n", None), ("150000 100000\n", 1.5), ("nonsense", None), (None, None)]
)
def test_container_quota(content: str | None, quota: float | None, tmp_path: Path) -> None:
    file = tmp_path / "cpu.max"
    if content is not None:
        file.write_text(content)
    assert cpu_quota(file) == quota


@pytest.mark.parametrize(("quota", "expected"), [(None, 4), (16.0, 4), (2.5, 2), (0.5, 1)])
def test_cores_are_bounded_by_the_quota(quota: float | None, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproduce.machine.devices.os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    monkeypatch.setattr(reproduce.machine.devices, "cpu_quota", lambda: quota)
    assert cores() == expected


def test_meta_devices_are_as_many_as_asked_for_and_hold_nothing() -> None:
    assert find_devices("meta", None) == Devices("meta", MOST_DEVICES)
    devices = find_devices("meta", 3)
    assert devices.first(2) == [torch.device("meta")] * 2 and devices.memory is None
    assert str(devices) == "3 devices that hold no data (meta)"
