"""Machine: what a record says about it is true, and None where it cannot be known."""

from __future__ import annotations

import os
import platform
import sys
from types import SimpleNamespace

import pytest
import torch

import torchgpipe
from reproduce.machine.description import Gpu, load_average, machine, versions


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


class Driver(SimpleNamespace):
    """Stand in for pynvml: the first GPU tells everything, the second only where it is."""

    def __getattr__(self, function: str) -> object:
        answers = {
            "__spec__": None,  # Python 3.13 asks for it
            "nvmlInit": None,
            "nvmlSystemGetDriverVersion": "575.57.08",
            "nvmlDeviceGetHandleByUUID": lambda uuid: {"GPU-0a-1": "one", "GPU-0a-2": "two"}[uuid],
            "nvmlDeviceGetMaxClockInfo": lambda handle, kind: {1: 1980, 2: 2619}[kind],
            "nvmlDeviceGetPowerManagementLimit": 700_000,
            "nvmlDeviceGetMaxPcieLinkGeneration": 5,
            "nvmlDeviceGetMaxPcieLinkWidth": 16,
            "nvmlDeviceGetNvLinkState": lambda handle, link: int(link < 2),
        }
        answer = answers[function]

        def ask(*arguments: object) -> object:
            if arguments and arguments[0] == "two":
                raise RuntimeError("not supported")
            return answer(*arguments) if callable(answer) else answer

        return ask


KNOWN = Gpu("NVIDIA H200", 1 << 37, 1980.0, 2619.0, 700.0, "PCIe 5.0 x16, 2 x NVLink")
UNKNOWN = Gpu("NVIDIA H200", 1 << 37)


@pytest.mark.parametrize(
    ("driver", "gpus", "version"),
    [(Driver(), [KNOWN, UNKNOWN], "575.57.08"), (None, [UNKNOWN, UNKNOWN], None)],
    ids=["driver", "no Python bindings"],
)
def test_what_the_driver_tells(
    driver: Driver | None, gpus: list[Gpu], version: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def properties(i: int) -> SimpleNamespace:
        return SimpleNamespace(name="NVIDIA H200", total_memory=1 << 37, uuid=f"0a-{i + 1}")

    monkeypatch.setitem(sys.modules, "pynvml", driver)
    assert versions()["driver"] == version
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    assert machine().gpus == gpus
