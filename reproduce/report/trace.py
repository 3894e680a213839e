"""Read the timeline of a real step from Chrome's trace JSON, as `python -m reproduce run … --trace FILE` writes it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from reproduce.error import Error
from reproduce.records.decode import DecodeError, Json, decode
from reproduce.records.record import read_json
from torchgpipe.plan.replay import Event, Timeline

__all__ = ["read_trace"]

MICROSECONDS = 1e6


@dataclass(frozen=True)
class Task:
    """Hold what is read of a complete event (`"ph": "X"`): kind, place, start and duration in microseconds."""

    cat: Literal["forward", "recompute", "backward"]
    ts: float
    dur: float
    micro_batch: int
    partition: int


def read_trace(path: Path) -> tuple[str, Timeline]:
    """Return the title and the timeline of a trace. Copies are left out, and time starts with the first task.

    Raises:
        Error: the file cannot be read, or is no such trace.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise Error(f"{path}: cannot be read ({error.strerror or error})") from error
    data = read_json(content, str(path))
    if not isinstance(data, dict) or not isinstance(data.get("traceEvents"), list):
        raise Error(f'{path}: not a trace (it has no list of "traceEvents")')
    title, tasks = path.stem, []
    try:
        for i, event in enumerate(data["traceEvents"]):
            found = decode(dict[str, Json], event, f"traceEvents[{i}]")
            if found.get("ph") == "M" and found.get("name") == "process_name":
                title = str(found.get("args", {}).get("name", title))
            elif found.get("ph") == "X" and found.get("cat") != "copy":
                tasks.append(_task(found, f"traceEvents[{i}]"))
    except DecodeError as error:
        raise Error(f"{path}: {error}") from error
    if not tasks:
        raise Error(f'{path}: not a trace of a step (no event is a task, "ph": "X")')
    begin = min(task.ts for task in tasks)
    events = [
        Event(task.cat, task.micro_batch, task.partition, (task.ts - begin) / MICROSECONDS,
              (task.ts + task.dur - begin) / MICROSECONDS)
        for task in sorted(tasks, key=lambda task: task.ts)
    ]  # fmt: skip
    return title, Timeline(events, max(event.end for event in events), max(task.partition for task in tasks) + 1)


def _task(event: dict[str, Json], where: str) -> Task:
    arguments = decode(dict[str, Json], event.get("args"), f"{where}.args")
    fields = {name: event.get(name) for name in ("cat", "ts", "dur")}
    place = {"micro_batch": arguments.get("micro-batch"), "partition": arguments.get("partition")}
    return decode(Task, {**fields, **place}, where)
