"""Describe the machine and the software that a record was made with. What cannot be found out is None."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path

import torch

from reproduce.machine.devices import cores
from reproduce.records.record import Git, Gpu, Machine

__all__ = ["ROOT", "git", "load_average", "machine", "versions"]

ROOT = Path(__file__).resolve().parents[2]  # of the checkout
PACKAGES = ("torch", "torchvision", "torchgpipe", "click", "tabulate")


def machine() -> Machine:
    """Return what the machine consists of."""
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        cpu=_cpu_model(),
        cores=cores(),
        cores_installed=os.cpu_count() or 1,
        memory=_memory(),
        gpus=_gpus(),
    )


def versions() -> dict[str, str | None]:
    """Return the versions of Python, of the packages in use and of the libraries below them."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    if found["torchgpipe"] is None:  # run from a checkout
        import torchgpipe

        found["torchgpipe"] = torchgpipe.__version__
    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    driver = next(iter(_nvidia_smi("driver_version").values()), [None])[0]
    return {**found, "cuda": torch.version.cuda, "cudnn": None if cudnn is None else str(cudnn), "driver": driver}


def git(root: Path = ROOT) -> Git | None:
    """Return the checkout's revision, and whether a tracked file differs from it; None outside a checkout."""
    revision = _output("git", "-C", str(root), "rev-parse", "HEAD")
    changes = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    if revision is None or changes is None:
        return None
    return Git(revision=revision.strip(), dirty=bool(changes.strip()))


def load_average() -> list[float] | None:
    """Return the load averages over 1, 5 and 15 minutes."""
    try:
        return list(os.getloadavg())
    except (OSError, AttributeError):
        return None


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    sysctl = _output("sysctl", "-n", "machdep.cpu.brand_string")
    return (sysctl or platform.processor() or platform.machine() or "unknown").strip()


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _gpus() -> list[Gpu]:
    if not torch.cuda.is_available():
        return []
    told = _nvidia_smi("clocks.max.sm", "clocks.max.memory", "power.limit", "pcie.link.gen.max", "pcie.link.width.max")
    nvlinks = _nvlinks(_output("nvidia-smi", "nvlink", "--status") or "")
    found = []
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        uuid = str(properties.uuid)
        clock, memory_clock, power, generation, width = told.get(uuid, [None] * 5)
        links = [f"PCIe {generation}.0 x{width}"] if _number(generation) and _number(width) else []
        links += [f"{nvlinks[uuid]} x NVLink"] if nvlinks.get(uuid) else []
        found.append(
            Gpu(
                name=properties.name,
                memory=properties.total_memory,
                clock=_number(clock),
                memory_clock=_number(memory_clock),
                power_limit=_number(power),
                link=", ".join(links) or None,
            )
        )
    return found


def _nvidia_smi(*fields: str) -> dict[str, list[str | None]]:
    """Return what nvidia-smi tells in these fields, for each GPU by its UUID."""
    lines = _output("nvidia-smi", f"--query-gpu=uuid,{','.join(fields)}", "--format=csv,noheader,nounits") or ""
    told = [[field.strip() for field in line.split(",")] for line in lines.splitlines()]
    return {uuid.removeprefix("GPU-"): list(rest) for uuid, *rest in told if len(rest) == len(fields)}


def _nvlinks(status: str) -> dict[str, int]:
    """Count the working NVLinks of each GPU by its UUID, in what `nvidia-smi nvlink --status` prints."""
    found: dict[str, int] = {}
    for line in status.splitlines():
        if (gpu := re.search(r"UUID: GPU-([0-9a-f-]+)", line)) is not None:
            found[uuid := gpu[1]] = 0
        elif found and re.search(r"Link \d+: [\d.]+ GB/s", line):
            found[uuid] += 1
    return found


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
