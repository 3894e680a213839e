"""Write timelines as Chrome trace JSON, which Perfetto (ui.perfetto.dev) opens.

Perfetto shows a row for each device's tasks, and a second row for the device's copies of tensors if
there are any. Arrows lead from task to task. The file is a JSON object in the Trace Event Format,
with these events:

    "ph": "X"   a task, with times in microseconds (a complete event)
    "ph": "s"   the start of an arrow
    "ph": "f"   the end of an arrow
    "ph": "M"   the name of a row (metadata)
"""

import json
from collections.abc import Iterator, Sequence
from itertools import count, pairwise
from typing import Any

from torchgpipe.schedules.action import Action, needs
from torchgpipe.schedules.replay import Event, Timeline

MICROSECONDS = 1e6
PROCESS = 1  # not 0, because Perfetto takes thread 0 of process 0 for an idle task and hides it

_NAMES = {
    "recompute": "recomputation",
    "backward_inputs": "backward of inputs",
    "backward_weights": "backward of weights",
}

TraceEvent = dict[str, Any]

_Arrows = dict[Action, int]
"""Maps a task to the number of the arrow that starts or ends at the task."""


def perfetto(steps: Sequence[Timeline], title: str, row: str, **more: float) -> bytes:
    """Return the content of a JSON file with which Perfetto shows timelines of some mini-batches.

    An arrow leads from each task to the task that needs its result. If a device has no task for a
    while between the first and the last task of a mini-batch, an event named `bubble` fills the
    gap, so that Perfetto can add up the gaps. The file's key `otherData` has the fraction of time
    that the gaps take.

    Args:
        steps: A timeline of each mini-batch. The times of all timelines are from one clock.
        title: The name of the process, which Perfetto shows above the rows.
        row: The first word of each row's name, such as `device`. The number of the row follows it.
        **more: Further values for the key `otherData`.
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
    """Return, for each device, the fraction of time (0 to 1) in which it runs no task.

    The time of a mini-batch lasts from the start of its first task to the end of its last task, on
    any device. Time between mini-batches does not count.
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
    """Return the numbers of the timeline's rows in which tensors are copied; a row is a device."""
    copying = set()
    for step in steps:
        for event in step.events:
            if event.kind == "copy":
                copying.add(step.row(event))
    return copying


def _tasks(number: int, step: Timeline, arrows: Iterator[int]) -> Iterator[list[TraceEvent]]:
    """Yield a list of trace events for each task or copy of a mini-batch.

    The first event is the task or copy itself. The other events are starts and ends of arrows: an
    arrow goes from a task to the task that uses its result.

    Args:
        number: The number of the mini-batch.
        step: The timeline of the mini-batch.
        arrows: An iterator of unused numbers, which become the ids of new arrows.
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
    """Return, for each task, the arrow that ends at it, and the arrow that starts at it.

    An arrow goes from a task to a task of another stage that needs its result. The result is two
    dictionaries from tasks to the numbers of arrows: of the arrows that end at the tasks, and of
    those that start there.
    """
    # A dictionary keeps the order of the tasks, in which the arrows get their ids. A set does not.
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
    """Yield a list with one event for each interval in which a device has no task."""
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
    """Return an event with a duration; `window` is its start and its end in seconds."""
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
    """Return the thread number by which the file refers to a device's tasks, or to its copies."""
    return 1 + 2 * row + copies


def row_of(thread: int) -> int:
    """Return the number of the device to which a thread number of the file refers."""
    return (thread - 1) // 2
