"""Write timelines as Chrome trace JSON, which Perfetto (ui.perfetto.dev) opens.

The file is a JSON object in the Trace Event Format. It has a complete event (`"ph": "X"`) for each
task, with times in microseconds, arrows between events (`"s"` where an arrow starts and `"f"` where
it ends), and metadata (`"M"`), which names the rows. Each device has a row for its tasks, and a
second row if it copies tensors.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import count, pairwise
from typing import Any

from torchgpipe.schedules.action import Action, needs
from torchgpipe.schedules.replay import Event, Timeline

MICROSECONDS = 1e6
PROCESS = 1  # Perfetto hides thread 0 of process 0, which it takes for an idle task of the system

_NAMES = {
    "recompute": "recomputation",
    "backward_inputs": "backward of inputs",
    "backward_weights": "backward of weights",
}

TraceEvent = dict[str, Any]

_Arrows = dict[Action, int]
"""The number of the arrow that starts or ends at each of these tasks."""


def perfetto(steps: Sequence[Timeline], title: str, row: str, **more: float) -> bytes:
    """Return the JSON of some mini-batches.

    Arrows lead from each task to the task that needs its result. Where a device does nothing
    between the first and the last task of a mini-batch, there is an event `bubble`, so that
    Perfetto can sum up these times. The share of the bubble is also written beside the events.

    Args:
        steps: A timeline of each mini-batch, all with times of one clock.
        title: The name of the process, which Perfetto shows above the rows.
        row: The name of a row, such as `device`, to which the row's number is added.
        more: Values that are written beside the events.
    """
    shares = bubbles(steps)
    events = [_name("process_name", 0, title)]
    for j in range(len(shares)):
        thread = _thread(j)
        events.append(_name("thread_name", thread, f"{row} {j}"))
    for j in sorted(_copying(steps)):
        thread = _thread(j, copies=True)
        events.append(_name("thread_name", thread, f"{row} {j}, copies"))
    arrows = count()
    for number, step in enumerate(steps):
        groups = [*_tasks(number, step, arrows), *_waits(number, step)]
        groups.sort(key=lambda group: group[0]["ts"])
        for group in groups:
            events += group
    other = {
        "step_seconds": [step.seconds for step in steps],
        "bubble": sum(shares) / len(shares) if shares else 0.0,
        "bubbles": shares,
        **more,
    }
    whole = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}
    text = json.dumps(whole, separators=(",", ":"))
    return text.encode() + b"\n"


def bubbles(steps: Sequence[Timeline]) -> list[float]:
    """Return the share of each partition's time in which it waits, from 0 to 1.

    The time of a mini-batch lasts from its first task to its last task, on any partition. Time
    between mini-batches does not count.
    """
    windows = [step.window for step in steps]
    seconds = sum(end - begin for begin, end in windows)
    if not seconds:
        return []
    shares = []
    for j in range(steps[0].partitions):
        busy = sum(step.busy(j) for step in steps)
        shares.append(max(0.0, 1 - busy / seconds))
    return shares


def _copying(steps: Sequence[Timeline]) -> set[int]:
    """Return the rows of devices that copy tensors."""
    copying = set()
    for step in steps:
        for event in step.events:
            if event.kind == "copy":
                copying.add(step.row(event))
    return copying


def _tasks(number: int, step: Timeline, arrows: Iterator[int]) -> Iterator[list[TraceEvent]]:
    """Yield the events of each task or copy: its own one, then the ends of arrows at it.

    Args:
        number: The number of the mini-batch.
        step: The timeline of the mini-batch.
        arrows: The numbers for further arrows.
    """
    arriving, leaving = _arrows(step, arrows)
    for event in step.events:
        span = _task(number, step, event)
        events = [span]
        place = {key: span[key] for key in ("cat", "pid", "tid", "ts")}
        task = Action(*event[:3])
        if task in arriving:
            end = {"name": "result", "id": arriving[task], "ph": "f", "bp": "e"}
            events.append(end | place)
        if task in leaving:
            events.append({"name": "result", "id": leaving[task], "ph": "s"} | place)
        yield events


def _arrows(step: Timeline, numbers: Iterator[int]) -> tuple[_Arrows, _Arrows]:
    """Number the arrows between stages, by the tasks at which they end, and at which they start."""
    # A dictionary keeps the order of tasks, in which arrows are numbered. A set would not.
    tasks = dict.fromkeys(Action(*event[:3]) for event in step.tasks)
    pairs = []
    arriving: _Arrows = {}
    for task in tasks:
        for source in needs(task, tasks):
            if source.stage != task.stage:
                pairs.append((source, task))
                if source in tasks:
                    arriving[task] = next(numbers)
    leaving: _Arrows = {}
    for source, task in pairs:
        if task in arriving:
            leaving[source] = arriving[task]
    return arriving, leaving


def _waits(number: int, step: Timeline) -> Iterator[list[TraceEvent]]:
    """Yield an event for each time in which a device does nothing."""
    begin, end = step.window
    for j in range(step.partitions):
        spans = sorted((task.start, task.end) for task in step.devices[j])
        about = {"mini-batch": number, "partition": j}
        for (_, before), (after, _) in pairwise([(begin, begin), *spans, (end, end)]):
            if after > before:
                yield [_span("bubble", "bubble", _thread(j), (before, after), about)]


def _task(number: int, step: Timeline, event: Event) -> TraceEvent:
    kind, i, j, start, end = event
    name = f"{_NAMES.get(kind, kind)} ({i}, {j})"
    thread = _thread(step.row(event), copies=kind == "copy")
    about = {"mini-batch": number, "micro-batch": i, "partition": j}
    return _span(name, kind, thread, (start, end), about)


def _span(
    name: str, kind: str, thread: int, window: tuple[float, float], about: dict[str, int]
) -> TraceEvent:
    """Return a complete event; `window` is its start and its end in seconds."""
    start, end = window
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


def _name(what: str, thread: int, name: str) -> TraceEvent:
    return {"ph": "M", "name": what, "pid": PROCESS, "tid": thread, "args": {"name": name}}


def _thread(row: int, *, copies: bool = False) -> int:
    """Return the thread as which Perfetto shows the tasks of a row, or its copies."""
    return 1 + 2 * row + copies


def row_of(thread: int) -> int:
    """Return the row of a device by the thread's number in the file."""
    return (thread - 1) // 2
