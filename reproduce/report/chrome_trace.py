"""Write a step's timeline as Chrome trace JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

The format is the Trace Event Format's JSON object: complete events (`"ph": "X"`) in microseconds, and metadata
events (`"ph": "M"`) that name processes and threads. A row is a process, a device a thread, and its copies another.
"""

from __future__ import annotations

import json

from reproduce.records.decode import Json
from reproduce.run.timeline import StepTimeline

__all__ = ["chrome_trace"]

MICROSECONDS = 1e6


def chrome_trace(timeline: StepTimeline, title: str) -> str:
    """Return the JSON text of a timeline."""
    events: list[Json] = [_name("process_name", 0, title)]
    for device in range(timeline.devices):
        events.append(_name("thread_name", 2 * device, f"device {device}"))
    for device in sorted({span.task.partition for span in timeline.spans if span.task.kind == "copy"}):
        events.append(_name("thread_name", 2 * device + 1, f"device {device}, copies"))
    for task, start, end in sorted(timeline.spans, key=lambda span: span.start):
        events.append(
            {
                "ph": "X",
                "name": f"{task.kind} {task.micro_batch}",
                "cat": task.kind,
                "pid": 0,
                "tid": 2 * task.partition + (task.kind == "copy"),
                "ts": start * MICROSECONDS,
                "dur": (end - start) * MICROSECONDS,
                "args": {"micro-batch": task.micro_batch, "partition": task.partition},
            }
        )
    other = {"step_seconds": timeline.seconds, "bubble": timeline.bubble}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}) + "\n"


def _name(what: str, thread: int, name: str) -> Json:
    return {"ph": "M", "name": what, "pid": 0, "tid": thread, "args": {"name": name}}
