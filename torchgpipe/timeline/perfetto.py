"""Write timelines as Chrome trace JSON, which Perfetto (ui.perfetto.dev) opens.

The format is the Trace Event Format's JSON object: complete events (`"ph": "X"`) in microseconds, arrows between them
(`"s"` and `"f"`), and metadata (`"M"`) that names rows. A partition is a row, and its copies are another.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import chain, count, pairwise
from typing import Any

from torchgpipe.plan.replay import Timeline, bubbles
from torchgpipe.tensors.observe import Kind, Task

MICROSECONDS = 1e6
PROCESS = 1  # not 0: that process and its thread 0 are the system's idle ones, which Perfetto does not show

_NAMES = {"recompute": "recomputation"}
_FROM: dict[Kind, int] = {"forward": -1, "backward": 1}
"""How many partitions later a task's input comes from."""


def perfetto(steps: Sequence[Timeline], title: str, row: str, **more: float) -> bytes:
    """Return the JSON of mini-batches, all on one clock; `row` is what a partition is called, such as `device`.

    Arrows lead from each task to the one that needs its result. Where a partition does nothing between the first task
    and the last of a mini-batch, there is an event called `bubble`, so that Perfetto can add them up. What `more` says
    is written beside the events, as is the share of the bubble.
    """
    shares = bubbles(steps)
    copying = {event.partition for step in steps for event in step.events if event.kind == "copy"}
    names = {_thread(j): f"{row} {j}" for j in range(len(shares))}
    names |= {_thread(j, copies=True): f"{row} {j}, copies" for j in sorted(copying)}
    events = [_name("process_name", 0, title), *(_name("thread_name", *name) for name in names.items())]
    arrows = count()
    for number, step in enumerate(steps):
        found = sorted([*_tasks(number, step, arrows), *_waits(number, step)], key=lambda events: events[0]["ts"])
        events += chain.from_iterable(found)
    other = {
        "step_seconds": [step.seconds for step in steps],
        "bubble": sum(shares) / len(shares) if shares else 0.0,
        "bubbles": shares,
        **more,
    }
    whole = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}
    return json.dumps(whole, separators=(",", ":")).encode() + b"\n"


def _tasks(number: int, step: Timeline, arrows: Iterator[int]) -> Iterator[list[dict[str, Any]]]:
    """Yield the events of each task: itself, then the ends of arrows at it."""
    tasks = {Task(*event[:3]) for event in step.tasks}
    pairs = [(t._replace(partition=t.partition + _FROM[t.kind]), t) for t in tasks if t.kind in _FROM]
    arriving = {target: next(arrows) for source, target in pairs if source in tasks}
    leaving = {source: arriving[target] for source, target in pairs if target in arriving}
    for kind, i, j, start, end in step.events:
        thread, about = _thread(j, copies=kind == "copy"), {"mini-batch": number, "micro-batch": i, "partition": j}
        events = [_span(f"{_NAMES.get(kind, kind)} ({i}, {j})", kind, thread, start, end, about)]
        place = {key: events[0][key] for key in ("cat", "pid", "tid", "ts")}
        for ends, more in ((arriving, {"ph": "f", "bp": "e"}), (leaving, {"ph": "s"})):
            if (arrow := ends.get(Task(kind, i, j))) is not None:
                events.append({"name": "result", "id": arrow, **more, **place})
        yield events


def _waits(number: int, step: Timeline) -> Iterator[list[dict[str, Any]]]:
    """Yield an event for each time in which a partition does nothing."""
    begin, end = step.window
    for j in range(step.partitions):
        own = sorted((task.start, task.end) for task in step.tasks if task.partition == j)
        for (_, before), (after, _) in pairwise([(begin, begin), *own, (end, end)]):
            if after > before:
                about = {"mini-batch": number, "partition": j}
                yield [_span("bubble", "bubble", _thread(j), before, after, about)]


def _span(name: str, kind: str, thread: int, start: float, end: float, about: dict[str, int]) -> dict[str, Any]:
    times = {"ts": start * MICROSECONDS, "dur": (end - start) * MICROSECONDS}
    return {"ph": "X", "name": name, "cat": kind, "pid": PROCESS, "tid": thread, **times, "args": about}


def _thread(partition: int, *, copies: bool = False) -> int:
    return 1 + 2 * partition + copies


def _name(what: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": PROCESS, "tid": thread, "args": {"name": name}}
