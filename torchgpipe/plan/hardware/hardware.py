"""Hardware descriptions: what a node's devices and links can do, from a small data file, and the seconds it takes them.

    hardware = load_hardware("p40x8")          # one that is shipped, or the path of a file
    seconds = hardware.seconds(operator)       # of one operator on one device
    seconds = hardware.transfer(nbytes)        # between two devices

A file is JSON. Every figure is an object with a `value` and a `source`. An efficiency belongs to a class of operators:
the share of the peak rate (those that have floating-point operations) or of the memory bandwidth that it reaches. A
compute efficiency as `conv.float16` is that of a class in one type of numbers. Where an operator can be computed in two
ways, the faster counts. Fused attention without an efficiency is taken to be as efficient as `matmul`, and TF32 without
a peak rate as fast as float32. `sharing` matters on CPUs: by which share of its time a task takes longer for each other
device that is at work.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchgpipe.plan.hardware.operators import CLASSES, Operator, excess

FOLDER = Path(__file__).parent

HEADROOM = 0.15
"""What a GPU's allocator is taken to reserve beyond tensors, as a share of these. In the papers' tables of memory it
reserved 2 to 22 % more than is predicted for tensors (results/predicted), libraries' workspaces included: the median,
14 %, rounded up."""

SCALARS = ("devices", "memory", "memory_bandwidth", "link_bandwidth", "link_latency", "launch")
OPTIONAL = ("workspace", "processors", "sharing")
TABLES = ("peak", "compute_efficiency", "memory_efficiency")
WORK = ("matmul", "conv", "conv3x3")
"""The classes that need a compute efficiency; all others only touch memory."""
WINOGRAD = "winograd"
"""The class that may be left out: where libraries have no such kernels, or `conv3x3` was measured with them."""
FUSED = ("attention", "attention_backward")
"""The classes that count as `matmul` where they are left out."""


@dataclass(frozen=True)
class Hardware:
    """A node of equal devices, and how fast they are.

    Units: bytes, bytes per second, seconds, and operations per second for `peak`, by type of floating-point number.
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
    """What the shortest operator takes, since the host has to issue it."""
    peak: Mapping[str, float] = field(default_factory=dict)
    compute_efficiency: Mapping[str, float] = field(default_factory=dict)
    launch_overlaps: bool = True
    """Whether issuing runs beside computing (a GPU), or before it (a CPU)."""
    workspace: float = 0.0
    """Bytes that libraries (cuDNN, cuBLAS) hold on each device, beside all tensors."""
    processors: int = 0
    """Parts of a device that compute tiles of matrices; 0 where tiles are not modelled."""
    sharing: float = 0.0
    """By which share of their time tasks take longer for each other device at work: those of a CPU share its memory."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where each figure comes from, by name; those in tables as `peak.float32`."""

    @property
    def cpu(self) -> bool:
        """Whether the devices are cores of a CPU, which issue operators themselves."""
        return not self.launch_overlaps

    def seconds(self, operator: Operator) -> float:
        """Return the seconds of one operator, the faster way.

        A GPU computes, moves bytes and issues the next operator at the same time, so that the longest counts. A core of
        a CPU does one after another.
        """
        work = self._work(operator)
        if operator.other and WINOGRAD in self.compute_efficiency:
            work = min(work, sum(map(self._work, operator.other)))
        return max(work, self.launch) if self.launch_overlaps else work + self.launch

    def transfer(self, nbytes: float) -> float:
        """Return the seconds that `nbytes` take from one device to another."""
        return self.link_latency + nbytes / self.link_bandwidth if nbytes else 0.0

    def room(self, memory: float, headroom: float | None = None) -> float:
        """Return the bytes that tensors may take of a device's `memory`, so that its allocator has room beside them.

        PyTorch's caching allocator on a GPU keeps what it has asked for: freed blocks that are too small or too large
        for the next tensor stay reserved, `HEADROOM` unless said otherwise. On a CPU, freed memory goes back.
        """
        if headroom is None:
            headroom = 0.0 if self.cpu else HEADROOM
        return (memory - self.workspace) / (1 + headroom)

    def _work(self, operator: Operator) -> float:
        moving = operator.bytes / (self.memory_bandwidth * self.memory_efficiency[operator.kind])
        if not operator.flops:
            return moving
        waste = excess(operator.grid, self.processors) if operator.grid and self.processors else 1.0
        computing = waste * operator.flops / self._rate(operator)
        return computing + moving if self.cpu else max(computing, moving)

    def _rate(self, operator: Operator) -> float:
        """Return the operations per second that an operator of this class reaches in its type of numbers."""
        dtype, shares = operator.dtype, self.compute_efficiency
        if dtype == "tf32" and dtype not in self.peak:
            dtype = "float32"
        if dtype not in self.peak:
            known = ", ".join(self.peak)
            raise ValueError(
                f"hardware {self.name!r} has no peak rate for {dtype}; it has {known}: add it to its file"
            )
        return self.peak[dtype] * (shares.get(f"{operator.kind}.{dtype}") or shares[operator.kind])


def hardware_names() -> list[str]:
    """Return the names of the shipped descriptions, in order."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load_hardware(name: str | Path) -> Hardware:
    """Return a shipped description by its name, or one from the path of a `.json` file.

    Raises:
        ValueError: there is none of that name, or its file is not a description; in one line.
    """
    path = Path(name)
    if path.suffix != ".json":
        path = FOLDER / f"{name}.json"
        if not path.is_file():
            raise ValueError(
                f"no hardware is called {str(name)!r}; there are {', '.join(hardware_names())}, "
                "or give the path of a description (.json)"
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
    scalars = (*SCALARS, *(key for key in OPTIONAL if key in data))
    values: dict[str, Any] = {key: _figure(key, data.get(key), sources) for key in scalars}
    for key in TABLES:
        table = data.get(key)
        if not isinstance(table, dict) or not table:
            raise ValueError(f"{key} is missing: expected an object of figures")
        values[key] = {
            item: _figure(f"{key}.{item}", figure, sources) for item, figure in table.items()
        }
    touching = [
        x
        for x in CLASSES
        if x not in FUSED and (x != WINOGRAD or x in values["compute_efficiency"])
    ]
    for key, needed, dtypes in (
        ("compute_efficiency", WORK, values["peak"]),
        ("memory_efficiency", touching, ()),
    ):
        shares = values[key]
        if wrong := sorted(
            shares.keys() - {*CLASSES, *(f"{kind}.{dtype}" for kind in CLASSES for dtype in dtypes)}
        ):
            raise ValueError(
                f"{key}.{wrong[0]} is no class of operators, nor one in a type of numbers that has a peak"
            )
        if lacking := [kind for kind in needed if kind not in shares]:
            raise ValueError(f"{key}.{lacking[0]} is missing")
        values[key] = {**dict.fromkeys(FUSED, shares["matmul"]), **shares}
    overlaps = data.get("launch_overlaps", True)
    if not isinstance(overlaps, bool):
        raise ValueError(f"launch_overlaps has to be true or false, got {overlaps!r}")
    values |= {key: int(values[key]) for key in ("devices", "processors") if key in values}
    return Hardware(
        name, str(data.get("title", name)), launch_overlaps=overlaps, sources=sources, **values
    )


def _figure(key: str, figure: Any, sources: dict[str, str]) -> float:
    """Return a figure's value, and note its source."""
    if not isinstance(figure, dict) or set(figure) != {"value", "source"}:
        raise ValueError(f"{key} has to be an object with value and source, got {figure!r}")
    value, source = figure["value"], figure["source"]
    number = (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and 0 <= value < float("inf")
    )
    if not number or (value == 0 and key not in OPTIONAL):
        raise ValueError(f"{key}: value has to be a number above 0, got {value!r}")
    if not isinstance(source, str) or not source.strip():
        raise ValueError(f"{key}: source has to say where the value is from")
    sources[key] = source
    return float(value)
