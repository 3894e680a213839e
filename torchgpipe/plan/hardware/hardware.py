"""Describe how fast a node's devices and links are, and predict seconds of operators and copies.

    hardware = load_hardware("p40x8")          # a shipped description, or the path of a file
    seconds = hardware.seconds(operator)       # of one operator on one device
    seconds = hardware.transfer(nbytes)        # of a copy between two devices

A hardware description is a JSON file. Every figure in it is a JSON object with a `value`, which is
a number, and a `source`, which says where the number comes from. For each class of operators, such
as `conv`, the file has two efficiencies. The compute efficiency is the share of the device's peak
rate that operators of the class reach. The memory efficiency is the share of the device's memory
bandwidth that they reach. A compute efficiency with a name such as `conv.float16` is for one class
and one dtype.

These rules are the same for all descriptions:

- If there are several kernels for an operator, the fastest one counts.
- Without an efficiency for fused attention, the efficiency of `matmul` counts.
- Without a peak rate for TF32, the peak rate of float32 counts.
- CPU devices slow each other down. If k of them work at the same time, a task takes 1 + `sharing` *
  (k - 1) times as long, where `sharing` is a figure of the description.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchgpipe.plan.hardware.operators import CLASSES, Operator, excess

Shares = dict[str, float]

FOLDER = Path(__file__).parent

HEADROOM = 0.15
"""The memory that a GPU's allocator reserves beyond the tensors, as a share of the tensors' bytes.

In the papers' tables of memory, the allocator reserved 2 to 22 % more than the bytes that are
predicted for tensors (results/predicted). The reserved memory includes workspaces of libraries. The
median is 14 %, which is rounded up here.
"""

SCALARS = ("devices", "memory", "memory_bandwidth", "link_bandwidth", "link_latency", "launch")
OPTIONAL = ("workspace", "processors", "sharing")
TABLES = ("peak", "compute_efficiency", "memory_efficiency")
WORK = ("matmul", "conv", "conv3x3")
"""The classes of operators that need a compute efficiency. The other classes only move bytes."""
WINOGRAD = "winograd"
"""A class that a description leaves out if such kernels do not exist or count as `conv3x3`."""
FUSED = ("attention", "attention_backward")
"""The classes that have the efficiency of `matmul` if a description leaves them out."""


@dataclass(frozen=True)
class Hardware:
    """A node of equal devices: their number, their memory, and how fast they and their links are.

    Amounts of memory are in bytes, bandwidths in bytes per second, and durations in seconds. The
    rates in `peak` are in floating-point operations per second, for each dtype.
    """

    name: str
    title: str
    devices: int
    memory: float
    memory_bandwidth: float
    link_bandwidth: float
    memory_efficiency: Mapping[str, float]
    link_latency: float
    launch: float = 0.0
    """The seconds that the host needs to launch an operator. On a GPU, no operator is shorter."""
    peak: Mapping[str, float] = field(default_factory=dict)
    compute_efficiency: Mapping[str, float] = field(default_factory=dict)
    launch_overlaps: bool = True
    """Whether launching overlaps with computing (on a GPU). On a CPU, it does not."""
    workspace: float = 0.0
    """The bytes that libraries (cuDNN, cuBLAS) hold on each device, beside all tensors."""
    processors: int = 0
    """The processors of a device, which compute tiles of matrices; 0 to ignore tiles."""
    sharing: float = 0.0
    """How much longer a task takes for each other device that works, as a share of its time.

    CPU devices slow each other down because they share their memory bandwidth.
    """
    sources: Mapping[str, str] = field(default_factory=dict)
    """Maps the name of each figure to its source. A figure of a table has a name like
    `peak.float32`."""

    @property
    def cpu(self) -> bool:
        """Whether the devices are cores of a CPU."""
        return not self.launch_overlaps

    def seconds(self, operator: Operator) -> float:
        """Return the seconds that one operator takes on a device, with its fastest kernels.

        On a GPU, the device computes, moves bytes and launches the next operator at the same time,
        so the longest of these three times counts. On a CPU core, the three times add up.
        """
        work = self._work(operator)
        if operator.other and WINOGRAD in self.compute_efficiency:
            work = min(work, sum(map(self._work, operator.other)))
        return max(work, self.launch) if self.launch_overlaps else work + self.launch

    def transfer(self, nbytes: float) -> float:
        """Return the seconds to copy `nbytes` bytes from one device to another."""
        return self.link_latency + nbytes / self.link_bandwidth if nbytes else 0.0

    def room(self, memory: float, headroom: float | None = None) -> float:
        """Return how many bytes tensors may take on a device.

        On a GPU, this number is less than the device's memory, because PyTorch's caching allocator
        needs more memory than the tensors take: it keeps freed blocks, also those whose size does
        not suit the next tensor. On a CPU, freed memory goes back to the system.

        Args:
            memory: The bytes of memory of the device.
            headroom: The memory to leave to the allocator, as a share of the tensors' bytes. The
                default is `HEADROOM` on a GPU, and 0 on a CPU.
        """
        if headroom is None:
            headroom = 0.0 if self.cpu else HEADROOM
        return (memory - self.workspace) / (1 + headroom)

    def _work(self, operator: Operator) -> float:
        """Return the seconds in which an operator computes and moves bytes, without its launch."""
        moving = operator.bytes / (self.memory_bandwidth * self.memory_efficiency[operator.kind])
        if not operator.flops:
            return moving
        waste = 1.0
        if operator.grid and self.processors:
            waste = excess(operator.grid, self.processors)
        computing = waste * operator.flops / self._rate(operator)
        return computing + moving if self.cpu else max(computing, moving)

    def _rate(self, operator: Operator) -> float:
        """Return how many floating-point operations per second an operator reaches on a device."""
        dtype = operator.dtype
        if dtype == "tf32" and dtype not in self.peak:
            dtype = "float32"
        if dtype not in self.peak:
            known = ", ".join(self.peak)
            raise ValueError(
                f"hardware {self.name!r} has no peak rate for {dtype}, only for {known}: "
                f"add the rate for {dtype} to the hardware's file"
            )
        shares = self.compute_efficiency
        share = shares.get(f"{operator.kind}.{dtype}") or shares[operator.kind]
        return self.peak[dtype] * share


def hardware_names() -> list[str]:
    """Return the sorted names of the hardware descriptions that this package ships."""
    return sorted([path.stem for path in FOLDER.glob("*.json")])


def load_hardware(name: str | Path) -> Hardware:
    """Load a hardware description, by its name or from its file.

    Args:
        name: The name of a shipped description, or the path of a `.json` file.

    Raises:
        ValueError: If there is no description with this name, or the file is not a description.
    """
    path = Path(name)
    if path.suffix != ".json":
        path = FOLDER / f"{name}.json"
        if not path.is_file():
            raise ValueError(
                f"no hardware is called {str(name)!r}: use one of {', '.join(hardware_names())}, "
                "or the path of a hardware description (.json)"
            )
    try:
        return _decoded(path.stem, json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise ValueError(f"{path}: not a hardware description in JSON: {error}") from error


def _decoded(name: str, data: Any) -> Hardware:
    if not isinstance(data, dict):
        raise ValueError("expected an object")
    known = {"title", "notes", "launch_overlaps", *OPTIONAL, *SCALARS, *TABLES}
    if unknown := sorted(set(data) - known):
        raise ValueError(f"{unknown[0]!r} is unknown; known are {', '.join(sorted(known))}")
    sources: dict[str, str] = {}
    values: dict[str, Any] = {}
    for key in (*SCALARS, *OPTIONAL):
        if key in data or key in SCALARS:
            values[key] = _figure(key, data.get(key), sources)
    for key in TABLES:
        values[key] = _table(key, data.get(key), sources)
    key = "compute_efficiency"
    values[key] = _efficiencies(key, values[key], WORK, values["peak"])
    optional = FUSED if WINOGRAD in values[key] else (*FUSED, WINOGRAD)
    needed = [kind for kind in CLASSES if kind not in optional]
    key = "memory_efficiency"
    values[key] = _efficiencies(key, values[key], needed, ())
    overlaps = data.get("launch_overlaps", True)
    if not isinstance(overlaps, bool):
        raise ValueError(f"launch_overlaps has to be true or false, got {overlaps!r}")
    for key in ("devices", "processors"):
        if key in values:
            values[key] = int(values[key])
    title = str(data.get("title", name))
    return Hardware(name, title, launch_overlaps=overlaps, sources=sources, **values)


def _table(key: str, table: Any, sources: dict[str, str]) -> Shares:
    """Check a table of a hardware description, such as `peak`; return its values by name.

    In the file, each entry of the table is a JSON object with a `value` and a `source`. The sources
    are added to `sources`.
    """
    if not isinstance(table, dict) or not table:
        raise ValueError(f"{key} is missing: expected an object of figures")
    return {item: _figure(f"{key}.{item}", figure, sources) for item, figure in table.items()}


def _efficiencies(key: str, shares: Shares, needed: Iterable[str], dtypes: Iterable[str]) -> Shares:
    """Check a table of efficiencies, and return it with entries for fused attention.

    If the table has no entry for fused attention, the efficiency of `matmul` is used for it.

    Args:
        key: The name of the table, for error messages.
        shares: The table: an efficiency for each class of operators. A name such as `conv.float16`
            is for one class and one dtype.
        needed: The classes that must be in the table.
        dtypes: The dtypes that may occur in names such as `conv.float16`.
    """
    known = set(CLASSES)
    for dtype in dtypes:
        known.update([f"{kind}.{dtype}" for kind in CLASSES])
    if wrong := sorted(shares.keys() - known):
        raise ValueError(
            f"{key} has an entry for {wrong[0]}, but {wrong[0]} is no class of operators; "
            f"use one of {', '.join(sorted(known))}"
        )
    for kind in needed:
        if kind not in shares:
            raise ValueError(f"{key}.{kind} is missing")
    return {**dict.fromkeys(FUSED, shares["matmul"]), **shares}


def _figure(key: str, figure: Any, sources: dict[str, str]) -> float:
    """Check one figure of a description; return its value, and add its source to `sources`.

    A figure is an object with a `value`, which is a number, and a `source`, which is text.
    """
    if not isinstance(figure, dict) or set(figure) != {"value", "source"}:
        raise ValueError(
            f"in the hardware description, {key} has to be a JSON object with the keys value and "
            f"source, but got {figure!r}"
        )
    value, source = figure["value"], figure["source"]
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value < float("inf") or (value == 0 and key not in OPTIONAL):
        raise ValueError(
            f"in the hardware description, the value of {key} has to be a number above 0, but got "
            f"{value!r}"
        )
    if not isinstance(source, str) or not source.strip():
        raise ValueError(
            f"in the hardware description, the source of {key} has to be text that says where the "
            "value is from"
        )
    sources[key] = source
    return float(value)
