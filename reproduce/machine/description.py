"""Describe the machine and the software that a record was made with. What cannot be found out is None."""

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from msgspec import Struct

from reproduce.machine.devices import cores, info

ROOT = Path(__file__).resolve().parents[2]  # the checkout
PACKAGES = ("torch", "torchvision", "click", "tabulate")
MOST_NVLINKS = 36  # NVML's indices are smaller than this
CLOCK_SM, CLOCK_MEMORY = 1, 2  # as nvml.h numbers them


class Gpu(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Describe one CUDA device: memory in bytes, highest clocks in MHz, power limit in W.

    `link` connects it to the rest of the machine, such as 'PCIe 5.0 x16, 18 x NVLink'.
    """

    name: str
    memory: int
    clock: float | None = None
    memory_clock: float | None = None
    power_limit: float | None = None
    link: str | None = None


class Machine(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Describe the machine: memory in bytes, `cores` those that this process may use."""

    system: str
    cpu: str
    cores: int
    cores_installed: int
    memory: int | None
    gpus: list[Gpu] = []


def machine() -> Machine:
    """Return what the machine consists of."""
    import torch

    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        cpu=info(Path("/proc/cpuinfo"), "model name")
        or platform.processor()
        or platform.machine()
        or "unknown",
        cores=cores(),
        cores_installed=os.cpu_count() or 1,
        memory=_memory(),
        gpus=[_gpu(i) for i in range(torch.cuda.device_count())]
        if torch.cuda.is_available()
        else [],
    )


def versions() -> dict[str, str | None]:
    """Return the versions of Python, of the packages in use and of the libraries below them."""
    import torch

    import torchgpipe

    packages: dict[str, str | None] = {
        "python": platform.python_version(),
        "torchgpipe": torchgpipe.__version__,
    }
    for package in PACKAGES:
        try:
            packages[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            packages[package] = None
    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    driver = _ask_driver("nvmlSystemGetDriverVersion")
    return {
        **packages,
        "cuda": torch.version.cuda,
        "cudnn": None if cudnn is None else str(cudnn),
        "driver": driver,
    }


def load_average() -> list[float] | None:
    """Return the load averages over 1, 5 and 15 minutes."""
    try:
        return list(os.getloadavg())
    except OSError:
        return None


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None


def _gpu(index: int) -> Gpu:
    """Describe a CUDA device of this process. It is looked up by UUID: the driver may use other indices than CUDA."""
    import torch

    properties = torch.cuda.get_device_properties(index)
    handle = _ask_driver("nvmlDeviceGetHandleByUUID", f"GPU-{properties.uuid}")
    if handle is None:
        return Gpu(properties.name, properties.total_memory)
    clock, memory_clock = (
        _ask_driver("nvmlDeviceGetMaxClockInfo", handle, kind) for kind in (CLOCK_SM, CLOCK_MEMORY)
    )
    milliwatts = _ask_driver("nvmlDeviceGetPowerManagementLimit", handle)
    generation = _ask_driver("nvmlDeviceGetMaxPcieLinkGeneration", handle)
    width = _ask_driver("nvmlDeviceGetMaxPcieLinkWidth", handle)
    nvlinks = sum(
        _ask_driver("nvmlDeviceGetNvLinkState", handle, i) == 1 for i in range(MOST_NVLINKS)
    )
    links = [f"PCIe {generation}.0 x{width}"] if generation and width else []
    links += [f"{nvlinks} x NVLink"] if nvlinks else []
    return Gpu(
        properties.name,
        properties.total_memory,
        clock and float(clock),
        memory_clock and float(memory_clock),
        milliwatts and milliwatts / 1000,
        ", ".join(links) or None,
    )


def _ask_driver(function: str, *arguments: object) -> Any:
    """Call a function of NVML and return its result; None if it fails, or if driver or Python bindings are missing."""
    try:
        import pynvml

        pynvml.nvmlInit()  # cheap to repeat: only the first call initializes
        return getattr(pynvml, function)(*arguments)
    except Exception:
        return None
