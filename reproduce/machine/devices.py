"""Choose the devices for experiments. On a CPU a device is an equal share of the cores."""

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from reproduce.error import Error

if TYPE_CHECKING:
    import torch

MOST_DEVICES = 8  # as many as the papers' largest machine has
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
MEMORY = Path("/proc/meminfo")
GPU_DRIVERS = [
    Path("/dev", name) for name in ("nvidiactl", "nvidia0", "nvmap", "dxg", "kfd")
]  # on Linux


@dataclass(frozen=True)
class Devices:
    """Hold `count` devices of one kind. On a CPU each has `threads` threads; on `meta` nothing is computed."""

    kind: str  # 'cpu', 'cuda' or 'meta'
    count: int
    threads: int | None = None

    def first(self, n: int) -> "list[torch.device]":
        """Return the first `n` devices. Where CUDA has fewer, return its first device n times, in place of all."""
        import torch

        if self.kind != "cuda":
            return [torch.device(self.kind)] * n
        return [torch.device("cuda", i if n <= self.count else 0) for i in range(n)]

    @property
    def memory(self) -> int | None:
        """Return the memory of the smallest CUDA device, or the free main memory that CPU devices share, in bytes."""
        if self.kind == "meta":
            return None
        if self.kind == "cpu":
            free = info(MEMORY, "MemAvailable")
            return None if free is None else int(free.removesuffix("kB")) * 1024
        import torch

        return min(
            torch.cuda.get_device_properties(device).total_memory
            for device in self.first(self.count)
        )

    def synchronize(self) -> None:
        """Wait until the CUDA devices have finished."""
        if self.kind == "cuda":
            import torch

            for device in self.first(self.count):
                torch.cuda.synchronize(device)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Set the number of threads of a CPU device, and restore it afterwards."""
        import torch

        before = torch.get_num_threads()
        if self.kind == "cpu" and self.threads is not None:
            torch.set_num_threads(self.threads)
        try:
            yield
        finally:
            if torch.get_num_threads() != before:
                torch.set_num_threads(before)

    def __str__(self) -> str:
        devices = "device" if self.count == 1 else "devices"
        if self.kind == "cuda":
            return f"{self.count} CUDA {devices}"
        if self.kind == "meta":
            return f"{self.count} {devices} that hold no data (meta)"
        each = "" if self.count == 1 else " each"
        return f"{self.count} CPU {devices} of {self.threads} thread{'' if self.threads == 1 else 's'}{each}"


def find_devices(kind: str | None, count: int | None) -> Devices:
    """Return so many devices, or raise `Error`. Default: all; CUDA devices if there are any, else CPU devices."""
    cuda = 0
    if (
        "torch" in sys.modules
        or sys.platform != "linux"
        or any(path.exists() for path in GPU_DRIVERS)
    ):
        import torch  # it takes seconds: `list` does without where there is no driver

        cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind is None:
        kind = "cuda" if cuda else "cpu"

    if kind == "meta":
        return Devices("meta", count or MOST_DEVICES)

    if kind == "cuda":
        if not cuda:
            raise Error(
                "--on cuda: this machine has no CUDA device that PyTorch can use; use --on cpu"
            )
        if count is not None and count > cuda:
            raise Error(
                f"--devices {count}: this machine has {cuda} CUDA device(s); use at most {cuda}"
            )
        return Devices("cuda", count or cuda)

    have = cores()
    count = count or min(have, MOST_DEVICES)
    if count > have:
        raise Error(
            f"--devices {count}: a CPU device is at least one core and this machine offers {have}; use at most {have}"
        )
    return Devices("cpu", count, threads=have // count)


def cores() -> int:
    """Count the CPU cores that this process may use, given its CPU affinity and its container's quota."""
    have = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        limit, period = CPU_QUOTA.read_text().split()
        return max(1, min(have, int(limit) // int(period)))
    except (OSError, ValueError):  # no container, or one without a limit: the file says "max"
        return have


def info(file: Path, name: str) -> str | None:
    """Return the first value of `name` in a Linux file of lines `name: value`; None if there is none."""
    try:
        lines = [line.partition(":") for line in file.read_text().splitlines()]
    except OSError:
        return None
    return next((said.strip() for key, _, said in lines if key.strip() == name), None)
