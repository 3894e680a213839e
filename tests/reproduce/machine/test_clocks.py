"""Tests of how clock rates and other states of GPUs are read and recorded.

A fake library replaces NVIDIA's library NVML. A record has the states of GPUs at the start and at
the end of a run, and in each round. In a round, every configuration runs one step.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from reproduce.machine import driver
from reproduce.machine.clocks import GpuState, clocks, gpu_states
from reproduce.machine.devices import Devices
from reproduce.records.record import Record
from reproduce.run.recorder import closed, new_run

from .nvml import Nvml

FIRST, SECOND = 0x7F0000000010, 0x7F0000000020
"""The addresses of NVML's objects for two GPUs."""
CLOCKS = {(FIRST, 1): 1755, (FIRST, 2): 2619, (SECOND, 1): 1980, (SECOND, 2): 2600}
IDLE, POWER, HEAT = 0x1, 0x4, 0x20
REASONS = {FIRST: POWER | HEAT, SECOND: IDLE}
TOLD: dict[str, Callable[..., Any]] = {
    "nvmlDeviceGetCount_v2": lambda: 2,
    "nvmlDeviceGetHandleByIndex_v2": [FIRST, SECOND].__getitem__,
    "nvmlDeviceGetHandleByUUID": {b"GPU-0a-1": FIRST, b"GPU-0a-2": SECOND}.__getitem__,
    "nvmlDeviceGetClockInfo": lambda gpu, kind: CLOCKS[gpu, kind],
    "nvmlDeviceGetPowerUsage": {FIRST: 698_520}.__getitem__,
    "nvmlDeviceGetUtilizationRates": {FIRST: (75, 30)}.__getitem__,
    "nvmlDeviceGetTemperature": lambda gpu, sensor: {FIRST: [71], SECOND: [33]}[gpu][sensor],
}
# NVML has changed the name of this function.
NAMES = [f"nvmlDeviceGetCurrentClocks{kind}Reasons" for kind in ("Event", "Throttle")]
WHY = ["software power cap", "software thermal slowdown"]
BOTH = [
    GpuState(0, 1755.0, 2619.0, 698.52, 71.0, idle=False, slowed_by=WHY),
    GpuState(1, 1980.0, 2600.0, temperature=33.0, idle=True, slowed_by=[]),
]
CUDA = Devices("cuda", 2)
SLOWEST = {"clock": 1755, "memory_clock": 2600}


@pytest.fixture(params=NAMES)
def nvml(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Nvml:
    """Replace NVML by a fake library with two GPUs."""

    def properties(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(uuid=f"0a-{device.index + 1}")

    library = Nvml({**TOLD, request.param: REASONS.__getitem__})
    monkeypatch.setattr(driver, "_nvml", lambda: library)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    return library


@pytest.mark.usefixtures("nvml")
def test_the_state_of_each_gpu() -> None:
    assert gpu_states() == BOTH


@pytest.mark.usefixtures("nvml")
def test_clocks_of_the_slowest_device_and_the_reasons_of_all() -> None:
    assert clocks(CUDA) == SLOWEST | {"slowed": POWER | HEAT | IDLE}
    assert clocks(Devices("cuda", 1)) == {
        "clock": 1755,
        "memory_clock": 2619,
        "slowed": POWER | HEAT,
    }
    assert clocks(Devices("cpu", 2, 1)) == {}


@pytest.mark.usefixtures("nvml")
def test_the_utilization_is_the_time_of_kernels() -> None:
    assert driver.utilization(torch.device("cuda", 0)) == 0.75
    assert driver.utilization(torch.device("cuda", 1)) is None


def test_what_the_driver_does_not_tell_is_left_out(nvml: Nvml) -> None:
    for name in (*NAMES, "nvmlDeviceGetPowerUsage"):
        vars(nvml).pop(name, None)
    assert clocks(CUDA) == SLOWEST
    assert gpu_states()[0] == GpuState(0, 1755.0, 2619.0, temperature=71.0)


def test_without_a_driver_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(uuid="0a-1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(driver, "LIBRARY", "libno-such-library.so.1")
    driver._nvml.cache_clear()
    try:
        assert gpu_states() == []
        assert clocks(CUDA) == {}
        assert driver.driver_version() is None
    finally:
        driver._nvml.cache_clear()


def test_a_run_has_the_clocks_of_its_start_and_of_its_end(nvml: Nvml) -> None:
    run = new_run(Devices("cpu", 1, 1), 0, ["python"])
    del nvml.nvmlDeviceGetPowerUsage  # type: ignore[attr-defined]

    record = closed(Record("name", "title", "measured", {}, [], run=run), "finished")

    assert record.run is not None
    assert record.run.gpus_at_start == BOTH
    assert [state.power for state in record.run.gpus_at_end] == [None, None]
    assert record.run.state == "finished"
