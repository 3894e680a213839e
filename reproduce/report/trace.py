"""Read the timeline of a real step from Chrome's trace JSON, as `python -m reproduce run … --trace FILE` writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from msgspec import Struct, field

from reproduce.error import Error
from reproduce.records.decode import Json, decode, read_json
from torchgpipe.plan.replay import Event, Timeline

__all__ = ["read_trace"]

MICROSECONDS = 1e6


class Place(Struct):
    """Hold where a task ran."""

    micro_batch: int = field(name="micro-batch")
    partition: int


class Task(Struct):
    """Hold what is read of a complete event (`"ph": "X"`): kind, start and duration in microseconds, and place."""

    cat: Literal["forward", "recompute", "backward"]
    ts: float
    dur: float
    args: Place


def read_trace(path: Path) -> tuple[str, Timeline]:
    """Return the title and the timeline of a trace. Copies are left out, and time starts with the first task.

    Raises:
        Error: the file cannot be read, or is no such trace.
    """
    data = read_json(path)
    if not isinstance(data, dict) or not isinstance(data.get("traceEvents"), list):
        raise Error(f'{path}: not a trace (it has no list of "traceEvents")')
    title, tasks = path.stem, []
    for i, event in enumerate(data["traceEvents"]):
        where = f"{path}: traceEvents[{i}]"
        match decode(dict[str, Json], event, where):
            case {"ph": "M", "name": "process_name", "args": {"name": name}}:
                title = str(name)
            case {"ph": "X", "cat": "copy"}:
                pass
            case {"ph": "X"}:
                tasks.append(decode(Task, event, where))
    if not tasks:
        raise Error(f'{path}: not a trace of a step (no event is a task, "ph": "X")')
    tasks.sort(key=lambda task: task.ts)
    begin = tasks[0].ts
    events = [
        Event(task.cat, task.args.micro_batch, task.args.partition, (task.ts - begin) / MICROSECONDS,
              (task.ts + task.dur - begin) / MICROSECONDS)
        for task in tasks
    ]  # fmt: skip
    return title, Timeline(events, max(event.end for event in events), max(task.args.partition for task in tasks) + 1)
