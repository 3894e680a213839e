"""Test what is asked of the GPU driver while rows run."""

import sys
from types import SimpleNamespace

import pytest
import torch

from reproduce.machine.devices import Devices
from reproduce.machine.driver import clocks

BOTH = Devices("cuda", 2)
RATES = {("one", 1): 1755, ("one", 2): 2619, ("two", 1): 1980, ("two", 2): 2600}
POWER, HEAT = 0x4, 0x20
REASONS = {"one": POWER, "two": HEAT}
SLOWEST = {"clock": 1755, "memory_clock": 2600}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replace the driver by one that knows the clock rates of two GPUs, and no reasons."""

    def properties(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(uuid=f"0a-{device.index + 1}")

    found = SimpleNamespace(
        __spec__=None,  # Python 3.13 asks for it
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID={"GPU-0a-1": "one", "GPU-0a-2": "two"}.__getitem__,
        nvmlDeviceGetClockInfo=lambda gpu, kind: RATES[gpu, kind],
    )
    monkeypatch.setitem(sys.modules, "pynvml", found)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    return found


@pytest.mark.parametrize("kind", ["Event", "Throttle"])
def test_clocks_of_the_slowest_device_and_the_reasons_of_all(
    kind: str, driver: SimpleNamespace
) -> None:
    assert clocks(BOTH) == SLOWEST
    name = f"nvmlDeviceGetCurrentClocks{kind}Reasons"  # NVML has changed the name
    setattr(driver, name, REASONS.__getitem__)
    assert clocks(BOTH) == SLOWEST | {"slowed": POWER | HEAT}
    assert clocks(Devices("cuda", 1)) == {"clock": 1755, "memory_clock": 2619, "slowed": POWER}


def test_without_a_driver_or_a_gpu_nothing_is_told(
    driver: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert clocks(Devices("cpu", 2, 1)) == {}
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert clocks(BOTH) == {}
