"""Describe the machine and the software with which a record (a file of results) was made.

A field is None if its value cannot be determined.
"""

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from msgspec import Struct

from reproduce.machine.devices import cores, info
from reproduce.machine.driver import CLOCK_MEMORY, CLOCK_SM, ask, driver_version, handle

ROOT = Path(__file__).resolve().parents[2]  # the checkout
PACKAGES = ("torch", "torchvision", "click", "tabulate")
MOST_NVLINKS = 36
"""The number of NVLinks of a GPU that NVML can report on."""


class Gpu(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A CUDA device.

    Attributes:
        memory: The memory in bytes.
        clock: The highest clock rate of the multiprocessors, in MHz.
        memory_clock: The highest clock rate of the memory, in MHz.
        power_limit: The power limit in watts.
        link: What connects the device to the rest of the machine, such as 'PCIe 5.0 x16, 18 x
            NVLink'.
    """

    name: str
    memory: int
    clock: float | None = None
    memory_clock: float | None = None
    power_limit: float | None = None
    link: str | None = None


class Machine(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A machine: its system, processor, cores, memory and GPUs."""

    system: str
    cpu: str
    cores: int  # that this process may use
    cores_installed: int
    memory: int | None  # bytes
    gpus: list[Gpu] = []


def machine() -> Machine:
    """Return a description of this machine."""
    import torch

    model = info(Path("/proc/cpuinfo"), "model name")
    gpus: list[Gpu] = []
    if torch.cuda.is_available():
        gpus = [_gpu(i) for i in range(torch.cuda.device_count())]
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        cpu=model or platform.processor() or platform.machine() or "unknown",
        cores=cores(),
        cores_installed=os.cpu_count() or 1,
        memory=_memory(),
        gpus=gpus,
    )


def versions() -> dict[str, str | None]:
    """Return the versions of Python, of the packages in use, of CUDA, cuDNN and the GPU driver."""
    import torch

    import torchgpipe

    packages: dict[str, str | None] = {
        "python": platform.python_version(),
        "torchgpipe": torchgpipe.__version__,
    }
    for package in PACKAGES:
        try:
            packages[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # noqa: PERF203 - look for the next one
            packages[package] = None
    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    packages["cuda"] = torch.version.cuda
    packages["cudnn"] = None if cudnn is None else str(cudnn)
    packages["driver"] = driver_version()
    return packages


def load_average() -> list[float] | None:
    """Return the load averages over 1, 5 and 15 minutes, or None if they are not known."""
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
    """Describe a CUDA device of this process."""
    import torch

    properties = torch.cuda.get_device_properties(index)
    known = handle(index)
    if known is None:
        return Gpu(properties.name, properties.total_memory)
    clock = ask("nvmlDeviceGetMaxClockInfo", known, CLOCK_SM)
    memory_clock = ask("nvmlDeviceGetMaxClockInfo", known, CLOCK_MEMORY)
    milliwatts = ask("nvmlDeviceGetPowerManagementLimit", known)
    return Gpu(
        name=properties.name,
        memory=properties.total_memory,
        clock=clock and float(clock),
        memory_clock=memory_clock and float(memory_clock),
        power_limit=milliwatts and milliwatts / 1000,
        link=_links(known),
    )


def _links(known: Any) -> str | None:
    """Return a text that says what connects a CUDA device to the rest of the machine."""
    links = []
    generation = ask("nvmlDeviceGetMaxPcieLinkGeneration", known)
    width = ask("nvmlDeviceGetMaxPcieLinkWidth", known)
    if generation and width:
        links.append(f"PCIe {generation}.0 x{width}")
    nvlinks = 0
    for i in range(MOST_NVLINKS):
        is_active = ask("nvmlDeviceGetNvLinkState", known, i)
        if is_active == 1:
            nvlinks += 1
    if nvlinks:
        links.append(f"{nvlinks} x NVLink")
    return ", ".join(links) or None
