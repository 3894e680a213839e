"""Define what a part of `python -m benchmarks.gpu` is, and what each part is given.

A part is a measurement, and a module of this package. `PARTS` has the names of the modules, in the
order in which they run. Each part runs in a process of its own, which is killed at the end of the
part's time. So a part has to write each result to a file as soon as the result is known.

The module of a part has:

- `PURPOSE`: one line that says which question the part answers. The page shows it.
- `SHARE`: the part's share of the command's time, as a number. When a part starts, it gets (the
  time that is left) x (its share) / (the sum of its own share and the shares of all later parts).
- `NEEDS`: the packages that the part needs in addition to those that `__main__.py` names, such as
  `["pytest"]`. If one of them is not installed, the part does not run, and the page says why. Only
  `run` imports these packages, so that the module can be imported without them.
- `run(context) -> dict`: does the work, and returns the whole result. Whenever something new is
  known, `run` calls `context.write` with all that is known so far.
- `lines(result) -> list[str]`: returns what the page says of a result: at most `MOST_LINES` lines
  of Markdown, each without a line break. The result is a dictionary that `run` gave to
  `context.write` or returned. It was written to JSON and read again, and it may be incomplete. The
  page is made in another process, perhaps on another machine. So `lines` may use nothing but the
  result.

One process imports the modules of all parts, and then forks a process for each part. So the import
of a module must neither use CUDA nor start a thread.

An error that `run` raises is a result, too: the page says that the part failed, and with which
error. The part's standard output and error are its log, `DIR/NAME/log.txt`.

Here is a whole part:

    PURPOSE = "how long a matrix product takes"
    SHARE = 1
    NEEDS: list[str] = []

    def run(context: Context) -> Fields:
        seconds: dict[str, float] = {}
        for size in (4096, 8192) if context.size == "paper" else (64,):
            if context.seconds_left() < 5:
                break  # what is missing in the result was not measured for lack of time
            seconds[str(size)] = measure(size, context.devices[0])
            context.write({"seconds": seconds})
        return {"seconds": seconds}

    def lines(result: Fields) -> list[str]:
        return [f"{size}: {seconds:.2g} s" for size, seconds in result["seconds"].items()]
"""

import importlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from reproduce.machine.devices import Devices
from reproduce.records.record import Record, Result, save, write_atomically
from reproduce.run.recorder import new_run

PARTS = (
    "machine",
    "cuda_tests",
    "machinery",
    "emulated",
    "memory",
    "overlap",
    "schedules",
    "several",
    "compiled",
)
MOST_LINES = 3
"""The number of lines that the page has for a part, beyond the line with its name."""
RESULT = "result.json"
RECORDS = "records"

Fields = dict[str, Any]
"""A part's result: a dictionary that JSON can express."""
Size = Literal["paper", "tiny"]


class Part(Protocol):
    """The type of a part's module. This file's docstring explains the module's attributes."""

    PURPOSE: str
    SHARE: float
    NEEDS: Sequence[str]

    def run(self, context: "Context") -> Fields: ...

    def lines(self, result: Fields) -> list[str]: ...


class Broken:
    """A stand-in for a part whose module cannot be imported; `run` raises the import's error."""

    PURPOSE = "its module cannot be imported"
    SHARE = 1.0
    NEEDS: Sequence[str] = ()

    def __init__(self, error: Exception) -> None:
        self.error = error

    def run(self, context: "Context") -> Fields:
        raise self.error

    def lines(self, result: Fields) -> list[str]:
        return []


def load_parts(names: Sequence[str]) -> dict[str, Part]:
    """Import the modules of the named parts, and return a dictionary from names to modules."""
    parts: dict[str, Part] = {}
    for name in names:
        module: Any
        try:
            module = importlib.import_module(f"benchmarks.gpu.{name}")
        except Exception as error:  # a part that is broken must not end the others
            module = Broken(error)
        parts[name] = module
    return parts


@dataclass(frozen=True)
class Context:
    """What a part (a measurement) is given: the size of its work, a folder, a deadline and more.

    Attributes:
        name: The name of the part.
        size: "paper" for models as large as the papers', or "tiny" for a dry run on the CPU, in
            which a part has a few seconds. A tiny run goes through the same code.
        folder: The part's folder, for its result, its log and other files. The folder exists.
        deadline: When the part has to be finished, by `time.monotonic`. The part is killed soon
            after its deadline.
        against: The folder that contains another torchgpipe, such as torchgpipe 0.0.7, or `None`.
        gpus: The number of GPUs that PyTorch can use.
    """

    name: str
    size: Size
    folder: Path
    deadline: float
    against: Path | None = None
    gpus: int = 0

    @property
    def devices(self) -> list[torch.device]:
        """Return all GPUs or, in a dry run, the CPU twice, as two devices.

        This property does not initialize CUDA. So the process can still fork processes that use
        CUDA.
        """
        if self.size == "tiny":
            return [torch.device("cpu")] * 2
        return [torch.device("cuda", i) for i in range(self.gpus)]

    def seconds_left(self) -> float:
        """Return the seconds that are left until the deadline; they are negative after it."""
        return self.deadline - time.monotonic()

    def write(self, result: Fields) -> None:
        """Write what the part (the measurement) has found so far to its file.

        The file of an earlier result is replaced in one step. So the file is complete even if the
        part is killed meanwhile.
        """
        write_atomically(self.folder / RESULT, json.dumps(result, indent=1) + "\n")

    def new_record(self, title: str, unit: dict[str, str], results: Sequence[Result]) -> Record:
        """Return a record that has this part's results, and describes machine and software.

        Args:
            title: What the numbers are, in a few words.
            unit: Maps the name of each value of a result to its unit, such as "s".
            results: The results so far.
        """
        devices = self.devices
        kind = devices[0].type
        threads = 1 if kind == "cpu" else None
        used = Devices(kind, len(devices), threads)
        command = ["python", "-m", "benchmarks.gpu", "--only", self.name]
        run = new_run(used, seed=0, command=command, settings={"size": self.size})
        name = f"gpu-{self.name}"
        return Record(name, title, "measured", unit, list(results), scale=self.size, run=run)

    def save(self, record: Record) -> None:
        """Write a record to `DIR/records`, in place of an earlier record of the same name."""
        folder = self.folder.parent / RECORDS
        folder.mkdir(exist_ok=True)
        save(record, folder / f"{record.name}.json")

    def say(self, line: str) -> None:
        """Add a line to the part's log."""
        print(line, file=sys.stderr, flush=True)
