"""Write timelines as Chrome trace JSON, which Perfetto (ui.perfetto.dev) opens.

The format is the Trace Event Format's JSON object: complete events (`"ph": "X"`) in microseconds, arrows between them
(`"s"` and `"f"`), and metadata (`"M"`) that names rows. A device is a row, and its copies are another.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import chain, count, pairwise
from typing import Any

from torchgpipe.schedules.action import Action, needs
from torchgpipe.schedules.replay import Timeline

MICROSECONDS = 1e6
PROCESS = 1  # not 0: that process and its thread 0 are the system's idle ones, which Perfetto does not show

_NAMES = {
    "recompute": "recomputation",
    "backward_inputs": "backward of inputs",
    "backward_weights": "backward of weights",
}


def perfetto(steps: Sequence[Timeline], title: str, row: str, **more: float) -> bytes:
    """Return the JSON of mini-batches, all on one clock; `row` is what each is called, such as `device`.

    Arrows lead from each task to the one that needs its result. Where one does nothing between the first task
    and the last of a mini-batch, there is an event called `bubble`, so that Perfetto can add them up. What `more` says
    is written beside the events, as is the share of the bubble.
    """
    shares = bubbles(steps)
    copying = {step.row(event) for step in steps for event in step.events if event.kind == "copy"}
    names = {_thread(j): f"{row} {j}" for j in range(len(shares))}
    names |= {_thread(j, copies=True): f"{row} {j}, copies" for j in sorted(copying)}
    events = [
        _name("process_name", 0, title),
        *(_name("thread_name", *name) for name in names.items()),
    ]
    arrows = count()
    for number, step in enumerate(steps):
        found = sorted(
            [*_tasks(number, step, arrows), *_waits(number, step)],
            key=lambda events: events[0]["ts"],
        )
        events += chain.from_iterable(found)
    other = {
        "step_seconds": [step.seconds for step in steps],
        "bubble": sum(shares) / len(shares) if shares else 0.0,
        "bubbles": shares,
        **more,
    }
    whole = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}
    return json.dumps(whole, separators=(",", ":")).encode() + b"\n"


def bubbles(steps: Sequence[Timeline]) -> list[float]:
    """Return the share of each partition's time in which it waits, from 0 to 1.

    Only time within steps counts, each from its first task to its last on any partition.
    """
    seconds = sum(end - start for start, end in (step.window for step in steps))
    if not seconds:
        return []
    busy = [sum(step.busy(j) for step in steps) for j in range(steps[0].partitions)]
    return [max(0.0, 1 - each / seconds) for each in busy]


def _tasks(number: int, step: Timeline, arrows: Iterator[int]) -> Iterator[list[dict[str, Any]]]:
    """Yield the events of each task: itself, then the ends of arrows at it."""
    # In their order, which a set would not have: it decides the numbers of arrows.
    tasks = dict.fromkeys(Action(*event[:3]) for event in step.tasks)
    pairs = [
        (source, task)
        for task in tasks
        for source in needs(task, tasks)
        if source.stage != task.stage
    ]
    arriving = {target: next(arrows) for source, target in pairs if source in tasks}
    leaving = {source: arriving[target] for source, target in pairs if target in arriving}
    for event in step.events:
        kind, i, j, start, end = event
        thread = _thread(step.row(event), copies=kind == "copy")
        about = {"mini-batch": number, "micro-batch": i, "partition": j}
        events = [_span(f"{_NAMES.get(kind, kind)} ({i}, {j})", kind, thread, start, end, about)]
        place = {key: events[0][key] for key in ("cat", "pid", "tid", "ts")}
        for ends, more in ((arriving, {"ph": "f", "bp": "e"}), (leaving, {"ph": "s"})):
            if (arrow := ends.get(Action(kind, i, j))) is not None:
                events.append({"name": "result", "id": arrow, **more, **place})
        yield events


def _waits(number: int, step: Timeline) -> Iterator[list[dict[str, Any]]]:
    """Yield an event for each time in which a device does nothing."""
    begin, end = step.window
    for j in range(step.partitions):
        own = sorted((task.start, task.end) for task in step.devices[j])
        for (_, before), (after, _) in pairwise([(begin, begin), *own, (end, end)]):
            if after > before:
                about = {"mini-batch": number, "partition": j}
                yield [_span("bubble", "bubble", _thread(j), before, after, about)]


def _span(
    name: str, kind: str, thread: int, start: float, end: float, about: dict[str, int]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": kind,
        "pid": PROCESS,
        "tid": thread,
        "ts": start * MICROSECONDS,
        "dur": (end - start) * MICROSECONDS,
        "args": about,
    }


def _thread(partition: int, *, copies: bool = False) -> int:
    return 1 + 2 * partition + copies


def row_of(thread: int) -> int:
    """Return the row that is written as this thread."""
    return (thread - 1) // 2


def _name(what: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": PROCESS, "tid": thread, "args": {"name": name}}
