"""Write and read a step's timeline as Chrome trace JSON, which Perfetto (ui.perfetto.dev) opens, too.

The format is the Trace Event Format's JSON object: complete events (`"ph": "X"`) in microseconds, and metadata
events (`"ph": "M"`) that name processes and threads. A row is a process, a device a thread, and its copies another.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import msgspec
from msgspec import Struct

from reproduce.error import Error
from reproduce.records.decode import decode, read_json
from reproduce.records.record import write_atomically
from torchgpipe.observe import Kind
from torchgpipe.plan.replay import Event, Timeline

MICROSECONDS = 1e6
PICTURES = (".svg", ".png")


class _Name(Struct, tag_field="ph", tag="M"):
    name: str  # what is named: 'process_name' or 'thread_name'
    pid: int
    tid: int
    args: dict[str, str]


class _Place(Struct, rename="kebab"):
    micro_batch: int
    partition: int


class _Task(Struct, tag_field="ph", tag="X"):
    name: str
    cat: Kind
    pid: int
    tid: int
    ts: float
    dur: float
    args: _Place


class _Trace(Struct, rename="camel"):
    trace_events: list[_Name | _Task]
    display_time_unit: str = "ms"
    other_data: dict[str, float] = {}


def chrome_trace(timeline: Timeline, title: str) -> bytes:
    """Return the JSON of a timeline."""
    copying = sorted({event.partition for event in timeline.events if event.kind == "copy"})
    names = {2 * j: f"device {j}" for j in range(timeline.partitions)}
    names |= {2 * j + 1: f"device {j}, copies" for j in copying}
    events: list[_Name | _Task] = [_Name("process_name", 0, 0, {"name": title})]
    events += [_Name("thread_name", 0, thread, {"name": name}) for thread, name in names.items()]
    for kind, i, j, start, end in sorted(timeline.events, key=lambda event: event.start):
        thread = 2 * j + (kind == "copy")
        times = start * MICROSECONDS, (end - start) * MICROSECONDS
        events.append(_Task(f"{kind} {i}", kind, 0, thread, *times, _Place(i, j)))
    other = {"step_seconds": timeline.seconds, "bubble": timeline.bubble}
    return msgspec.json.encode(_Trace(events, other_data=other)) + b"\n"


def read_trace(path: Path) -> tuple[str, Timeline]:
    """Return the title and the timeline of a trace that `chrome_trace` wrote.

    Raises:
        Error: the file cannot be read, or is no such trace.
    """
    trace = decode(_Trace, read_json(path), f"{path}: not a trace of a step")
    title, events = path.stem, []
    for event in trace.trace_events:
        if isinstance(event, _Task):
            times = event.ts / MICROSECONDS, (event.ts + event.dur) / MICROSECONDS
            events.append(Event(event.cat, event.args.micro_batch, event.args.partition, *times))
        elif event.name == "process_name":
            title = event.args["name"]
    if not any(event.kind != "copy" for event in events):
        raise Error(f'{path}: not a trace of a step (no event is a task, "ph": "X")')
    events.sort(key=lambda event: event.start)
    seconds = trace.other_data.get("step_seconds") or max(event.end for event in events)
    return title, Timeline(events, seconds, max(event.partition for event in events) + 1)


class Tracer:
    """Write each row's timeline to `FILE.json` and `FILE.svg`, or `.png` where that is asked for.

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

    def _write(self, path: Path, content: bytes) -> None:
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
