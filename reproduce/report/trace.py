"""Write and read the timeline of a training step as a trace file.

The viewer Perfetto (ui.perfetto.dev) shows such files. `torchgpipe.timeline` defines the format.
"""

import re
from collections import defaultdict
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from reproduce.error import Error
from reproduce.records.places import decode, read_json
from reproduce.records.record import write_atomically
from torchgpipe.plan.predict.replay import Event, Timeline
from torchgpipe.tensors.observe import Kind
from torchgpipe.timeline.perfetto import MICROSECONDS, perfetto, row_of

PICTURES = (".svg", ".png")


class _Name(Struct, tag_field="ph", tag="M"):
    name: str  # what is named: 'process_name' or 'thread_name'
    args: dict[str, str]


class _Start(Struct, tag_field="ph", tag="s"):
    """The start of an arrow in a trace file, from one task to another. `read_trace` ignores it."""


class _End(Struct, tag_field="ph", tag="f"):
    pass


class _Place(Struct, rename="kebab"):
    partition: int
    micro_batch: int = 0
    mini_batch: int = 0


class _Span(Struct, tag_field="ph", tag="X"):
    cat: Kind | Literal["bubble"]
    ts: float
    dur: float
    tid: int
    args: _Place


class _Trace(Struct, rename="camel"):
    trace_events: list[_Name | _Span | _Start | _End]
    other_data: dict[str, Any] = {}


def read_trace(path: Path) -> list[tuple[str, Timeline]]:
    """Return a title and a timeline for each mini-batch in a trace file.

    The function `torchgpipe.timeline.perfetto.perfetto` must have written the file.

    Raises:
        Error: The file is not a trace of a training step.
    """
    trace = decode(_Trace, read_json(path), f"{path}: not a trace of a step")
    title = path.stem
    steps: dict[int, list[Event]] = defaultdict(list)
    rows: dict[int, int] = {}  # of the stages
    has_tasks = False
    for event in trace.trace_events:
        if isinstance(event, _Span) and event.cat != "bubble":
            at = event.args
            start = event.ts / MICROSECONDS
            end = (event.ts + event.dur) / MICROSECONDS
            rows[at.partition] = row_of(event.tid)
            task = Event(event.cat, at.micro_batch, at.partition, start, end)
            steps[at.mini_batch].append(task)
            if event.cat != "copy":
                has_tasks = True
        elif isinstance(event, _Name) and event.name == "process_name":
            title = event.args["name"]
    if not has_tasks:
        raise Error(f'{path}: not a trace of a step (it has no task, an event with "ph": "X")')
    stages = 1 + max(rows)
    placement = [rows.get(stage, 0) for stage in range(stages)]
    devices = 1 + max(placement)
    seconds = dict(enumerate(trace.other_data.get("step_seconds", [])))
    found = []
    for number, events in sorted(steps.items()):
        events.sort(key=lambda event: event.start)
        window = events[-1].end - events[0].start
        timeline = Timeline(events, seconds.get(number, window), devices, placement)
        name = f"{title}, mini-batch {number}" if len(steps) > 1 else title
        found.append((name, timeline))
    return found


class Tracer:
    """Writes the timeline of each row (training run) to a trace file, and draws a picture of it.

    Errors are collected in `problems`, so that a measurement does not fail because of a picture.

    Args:
        file: The path `FILE` of the trace file, `FILE.json`. If the path has the suffix `.png`, the
            picture is a PNG instead of an SVG.
        several: Whether each row has files of its own, such as `FILE-pipeline-2.json`.
        experiments: Whether the names of these files also contain the name of the experiment.
        draw: Whether pictures are drawn.
    """

    def __init__(
        self, file: Path, *, several: bool, experiments: bool = False, draw: bool = True
    ) -> None:
        self.kind = file.suffix if file.suffix in PICTURES else PICTURES[0]
        self.base = file.with_suffix("") if file.suffix in (".json", *PICTURES) else file
        self.several = several
        self.experiments = experiments
        self.draw = draw
        self.written: list[Path] = []
        self.problems: list[str] = []

    def __call__(self, experiment: str, row: str, timeline: Timeline) -> None:
        """Write the timeline of a row to a trace file and, if `draw` is true, draw its picture."""
        title = f"{experiment}: {row}"
        base = str(self.base)
        if self.several:
            name = f"{experiment} {row}" if self.experiments else row
            base += "-" + re.sub("[^A-Za-z0-9]+", "-", name)
        self._write(Path(f"{base}.json"), perfetto([timeline], title, "device"))
        if not self.draw:
            return
        path = Path(base + self.kind)
        try:
            from reproduce.report.gantt import gantt

            picture = gantt(timeline, title, self.kind[1:])
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            self.problems.append(f"{path}: cannot be drawn ({reason})")
        else:
            self._write(path, picture)

    def _write(self, path: Path, content: bytes) -> None:
        try:
            write_atomically(path, content)
        except Error as error:
            self.problems.append(str(error))
        else:
            self.written.append(path)
