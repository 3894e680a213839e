"""Choose the devices on which experiments run.

The CPU can stand for several devices. Each of these devices has an equal number of CPU cores.
"""

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

MOST_DEVICES = 8  # the papers' largest machine has this number of devices
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
MEMORY = Path("/proc/meminfo")
# Files that a GPU's driver makes on Linux:
GPU_DRIVERS = [Path("/dev", name) for name in ("nvidiactl", "nvidia0", "nvmap", "dxg", "kfd")]


@dataclass(frozen=True)
class Devices:
    """A number of devices of one kind.

    Attributes:
        kind: "cpu", "cuda", or "meta", on which tensors have no data and nothing is computed.
        count: The number of devices.
        threads: The number of threads of each CPU device. None if the devices are no CPU devices.
    """

    kind: str
    count: int
    threads: int | None = None

    def first(self, n: int) -> "list[torch.device]":
        """Return the first `n` devices.

        If there are fewer than `n` CUDA devices, the first one takes the place of all: the list
        contains it `n` times.
        """
        import torch

        if self.kind != "cuda":
            return [torch.device(self.kind)] * n
        if n > self.count:
            return [torch.device("cuda", 0)] * n
        return [torch.device("cuda", i) for i in range(n)]

    @property
    def memory(self) -> int | None:
        """Return the number of bytes that are available for tensors.

        For CUDA devices, this is the memory of the smallest device. For CPU devices, it is the free
        main memory, which all CPU devices share. For `meta`, or if the number is not known, it is
        None.
        """
        if self.kind == "meta":
            return None
        if self.kind == "cpu":
            free = info(MEMORY, "MemAvailable")
            if free is None:
                return None
            return int(free.removesuffix("kB")) * 1024
        import torch

        sizes = []
        for device in self.first(self.count):
            properties = torch.cuda.get_device_properties(device)
            sizes.append(properties.total_memory)
        return min(sizes)

    def synchronize(self) -> None:
        """Wait until the CUDA devices have finished."""
        if self.kind == "cuda":
            import torch

            for device in self.first(self.count):
                torch.accelerator.synchronize(device)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Within a `with` block, let PyTorch use as many threads as one CPU device has."""
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
        threads = "thread" if self.threads == 1 else "threads"
        each = "" if self.count == 1 else " each"
        return f"{self.count} CPU {devices} of {self.threads} {threads}{each}"


def find_devices(kind: str | None, count: int | None) -> Devices:
    """Return `count` devices of a kind; raise `Error` if there are fewer.

    Args:
        kind: "cpu", "cuda" or "meta". By default, "cuda" if there are CUDA devices, else "cpu".
        count: The number of devices. By default, all CUDA devices, or one CPU device for each core
            (at most `MOST_DEVICES`).
    """
    cuda = _cuda_devices()
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
            f"--devices {count}: a CPU device needs at least one core, and this machine has "
            f"{have}; use at most {have}"
        )
    return Devices("cpu", count, threads=have // count)


def _cuda_devices() -> int:
    """Count the CUDA devices. If there is no GPU driver, return 0 without importing PyTorch.

    The import takes seconds, and the command `list` does not need PyTorch otherwise.
    """
    may_have = "torch" in sys.modules or sys.platform != "linux"
    if not may_have and not any(path.exists() for path in GPU_DRIVERS):
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def cores() -> int:
    """Return the number of CPU cores that this process may use.

    The number is limited by the CPU affinity of the process and by the quota of its container.
    """
    have = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        have = len(os.sched_getaffinity(0))
    try:
        limit, period = CPU_QUOTA.read_text().split()
        quota = int(limit) // int(period)
    except (OSError, ValueError):  # there is no container, or it has no limit (the file says "max")
        return have
    return max(1, min(have, quota))


def info(file: Path, name: str) -> str | None:
    """Return the value of `name` in a file with lines `name: value`, such as /proc/meminfo.

    If several lines have this name, the first of them counts. If there is no such line or no such
    file, return None.
    """
    try:
        text = file.read_text()
    except OSError:
        return None
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None
