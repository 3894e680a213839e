"""Say which devices an experiment may use. On a CPU a device is a share of the cores, the same for every row."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from reproduce.error import USAGE, Error

__all__ = ["MOST_DEVICES", "Devices", "cores", "find_devices"]

MOST_DEVICES = 8  # as many as the papers' largest machine has
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True)
class Devices:
    """Hold `count` devices of one kind; on a CPU each computes with `threads` threads, on `meta` none does."""

    kind: str  # 'cpu', 'cuda' or 'meta'
    count: int
    threads: int | None = None

    def first(self, n: int) -> list[torch.device]:
        """Return the first `n` devices."""
        if self.kind != "cuda":
            return [torch.device(self.kind)] * n
        return [torch.device("cuda", i) for i in range(n)]

    @property
    def memory(self) -> int | None:
        """Give the bytes of the smallest device; on a CPU, where all share it, of the main memory that is free."""
        if self.kind == "meta":
            return None
        if self.kind == "cpu":
            return free_memory()
        return min(torch.cuda.get_device_properties(device).total_memory for device in self.first(self.count))

    def synchronize(self) -> None:
        """Wait until every device has done what it was given."""
        if self.kind == "cuda":
            for device in self.first(self.count):
                torch.cuda.synchronize(device)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Give each CPU device its threads, and the program's own number back afterwards."""
        before = torch.get_num_threads()
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def __str__(self) -> str:
        plural = "" if self.count == 1 else "s"
        if self.kind == "cuda":
            return f"{self.count} CUDA device{plural}"
        if self.kind == "meta":
            return f"{self.count} device{plural} that hold no data (meta)"
        return f"{self.count} CPU device{plural} of {self.threads} thread{'' if self.threads == 1 else 's'}"


def find_devices(kind: str | None, count: int | None) -> Devices:
    """Return the devices to use: of `kind`, or CUDA where there is any; `count` of them, or all.

    Raises:
        Error: there are not so many.
    """
    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind is None:
        kind = "cuda" if cuda else "cpu"

    if kind == "cuda":
        if not cuda:
            raise Error("--on cuda: this machine has no CUDA device that PyTorch can use; use --on cpu", USAGE)
        if count is not None and count > cuda:
            raise Error(f"--devices {count}: this machine has {cuda} CUDA device(s); use at most {cuda}", USAGE)
        return Devices("cuda", count or cuda)

    if kind == "meta":
        return Devices("meta", count or MOST_DEVICES)

    have = cores()
    if count is not None and count > have:
        raise Error(
            f"--devices {count}: a CPU device is at least one core and this machine offers {have}; use at most {have}",
            USAGE,
        )
    count = count or min(have, MOST_DEVICES)
    return Devices("cpu", count, threads=have // count)


def cores() -> int:
    """Count the CPU cores that this process may use: its affinity, and a container's quota."""
    have = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return have if quota is None else max(1, min(have, math.floor(quota)))


def cpu_quota(file: Path = CPU_QUOTA) -> float | None:
    """Read how many CPUs' time a container may use; None where nothing limits it."""
    try:
        limit, period = file.read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return None


def free_memory() -> int | None:
    """Return the bytes of main memory that are free for use; None where the system does not tell."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None
