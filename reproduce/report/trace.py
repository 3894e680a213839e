"""Write and read a step's timeline as Chrome trace JSON, which Perfetto (ui.perfetto.dev) opens, too.

The format is the Trace Event Format's JSON object: complete events (`"ph": "X"`) in microseconds, and metadata
events (`"ph": "M"`) that name processes and threads. A row is a process, a device a thread, and its copies another.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

from msgspec import Struct, field

from reproduce.error import Error
from reproduce.records.decode import Json, decode, read_json
from reproduce.records.record import write_atomically
from torchgpipe.observe import Kind
from torchgpipe.plan.replay import Event, Timeline

MICROSECONDS = 1e6
PICTURES = (".svg", ".png")


def chrome_trace(timeline: Timeline, title: str) -> str:
    """Return the JSON text of a timeline."""
    copying = sorted({event.partition for event in timeline.events if event.kind == "copy"})
    events: list[Json] = [
        _name("process_name", 0, title),
        *(_name("thread_name", 2 * j, f"device {j}") for j in range(timeline.partitions)),
        *(_name("thread_name", 2 * j + 1, f"device {j}, copies") for j in copying),
    ]
    for event in sorted(timeline.events, key=lambda event: event.start):
        events.append(
            {
                "ph": "X",
                "name": f"{event.kind} {event.micro_batch}",
                "cat": event.kind,
                "pid": 0,
                "tid": 2 * event.partition + (event.kind == "copy"),
                "ts": event.start * MICROSECONDS,
                "dur": (event.end - event.start) * MICROSECONDS,
                "args": {"micro-batch": event.micro_batch, "partition": event.partition},
            }
        )
    other = {"step_seconds": timeline.seconds, "bubble": timeline.bubble}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}) + "\n"


def _name(what: str, thread: int, name: str) -> Json:
    return {"ph": "M", "name": what, "pid": 0, "tid": thread, "args": {"name": name}}


class _Place(Struct):
    micro_batch: int = field(name="micro-batch")
    partition: int


class _Complete(Struct):
    """Hold what is read of a complete event: start and duration in microseconds, and place."""

    cat: Kind
    ts: float
    dur: float
    args: _Place


def read_trace(path: Path) -> tuple[str, Timeline]:
    """Return the title and the timeline of a trace that `chrome_trace` wrote.

    Raises:
        Error: the file cannot be read, or is no such trace.
    """
    data = read_json(path)
    if not isinstance(data, dict) or not isinstance(data.get("traceEvents"), list):
        raise Error(f'{path}: not a trace (it has no list of "traceEvents")')
    title, events = path.stem, []
    for i, item in enumerate(data["traceEvents"]):
        where = f"{path}: traceEvents[{i}]"
        match decode(dict[str, Json], item, where):
            case {"ph": "M", "name": "process_name", "args": {"name": name}}:
                title = str(name)
            case {"ph": "X"}:
                read = decode(_Complete, item, where)
                times = read.ts / MICROSECONDS, (read.ts + read.dur) / MICROSECONDS
                events.append(Event(read.cat, read.args.micro_batch, read.args.partition, *times))
    if not any(event.kind != "copy" for event in events):
        raise Error(f'{path}: not a trace of a step (no event is a task, "ph": "X")')
    events.sort(key=lambda event: event.start)
    seconds = data.get("otherData", {}).get("step_seconds") or max(event.end for event in events)
    return title, Timeline(events, seconds, max(event.partition for event in events) + 1)


class Tracer:
    """Write each row's timeline beside `file`: `FILE.json` and `FILE.svg`, or `.png` where that is asked for.

    Several rows cannot share a file, so their names come after it, `FILE-pipeline-2.json`, and where there are
    several experiments theirs before that. What cannot be drawn or written is remembered in `problems`: a measurement
    shall not end for want of a picture.
    """

    def __init__(self, file: Path, *, several: bool, experiments: bool = False, draw: bool = True) -> None:
        self.kind = file.suffix if file.suffix in PICTURES else PICTURES[0]
        self.base = file.with_suffix("") if file.suffix in (".json", *PICTURES) else file
        self.several, self.experiments, self.draw = several, experiments, draw
        self.written: list[Path] = []
        self.problems: list[str] = []

    def __call__(self, experiment: str, row: str, timeline: Timeline) -> None:
        """Write a row's timeline."""
        title, base = f"{experiment}: {row}", str(self.base)
        if self.several:
            name = f"{experiment} {row}" if self.experiments else row
            base += "-" + re.sub("[^A-Za-z0-9]+", "-", name)
        self._write(Path(f"{base}.json"), chrome_trace(timeline, title))
        if not self.draw:
            return
        path = Path(base + self.kind)
        try:
            from reproduce.report.gantt import gantt

            picture = gantt(timeline, title, self.kind[1:])
        except Exception as error:
            self.problems.append(f"{path}: cannot be drawn ({type(error).__name__}: {error})")
        else:
            self._write(path, picture)

    def _write(self, path: Path, content: str | bytes) -> None:
        try:
            write_atomically(path, content)
        except Error as error:
            self.problems.append(str(error))
        else:
            self.written.append(path)


def matplotlib_problem() -> str | None:
    """Say why no picture can be drawn, and what to do; None where one can."""
    if importlib.util.find_spec("matplotlib") is None:
        return "--trace: no picture, only JSON, for matplotlib is not installed: 'pip install matplotlib'"
    return None
