"""Perfetto's file: rows, tasks, bubbles and arrows are in their places."""

from __future__ import annotations

import json
from typing import Any

from torchgpipe.plan.replay import Event, Timeline
from torchgpipe.timeline.perfetto import perfetto

STEP = Timeline(
    [
        Event("forward", 0, 0, 0.25, 0.5),
        Event("copy", 0, 0, 0.5, 0.625),
        Event("forward", 0, 1, 0.625, 0.75),
        Event("recompute", 0, 1, 0.75, 0.875),
        Event("backward", 0, 1, 0.875, 1.25),
        Event("backward", 0, 0, 1.25, 1.5),
    ],
    seconds=1.75,
    partitions=2,
)
TASKS = [
    ("forward (0, 0)", 1, 250_000, 250_000),
    ("bubble", 3, 250_000, 375_000),
    ("copy (0, 0)", 2, 500_000, 125_000),
    ("bubble", 1, 500_000, 750_000),
    ("forward (0, 1)", 3, 625_000, 125_000),
    ("recomputation (0, 1)", 3, 750_000, 125_000),
    ("backward (0, 1)", 3, 875_000, 375_000),
    ("backward (0, 0)", 1, 1_250_000, 250_000),
    ("bubble", 3, 1_250_000, 250_000),
]


def written(*steps: Timeline) -> tuple[list[Any], dict[str, Any]]:
    whole = json.loads(perfetto(steps, "a title", "rank", clock_error=0.5))
    return whole["traceEvents"], whole["otherData"]


def test_rows_tasks_and_bubbles() -> None:
    events, other = written(STEP)
    assert [(e["name"], e["tid"], e["args"]["name"]) for e in events if e["ph"] == "M"] == [
        ("process_name", 0, "a title"),
        ("thread_name", 1, "rank 0"),
        ("thread_name", 3, "rank 1"),
        ("thread_name", 2, "rank 0, copies"),
    ]
    spans = [e for e in events if e["ph"] == "X"]
    assert [(e["name"], e["tid"], e["ts"], e["dur"]) for e in spans] == TASKS
    assert spans[4]["args"] == {"mini-batch": 0, "micro-batch": 0, "partition": 1}
    assert other == {"step_seconds": [1.75], "bubble": 0.55, "bubbles": [0.6, 0.5], "clock_error": 0.5}


def test_arrows_lead_to_the_task_that_needs_the_result() -> None:
    later = [event._replace(start=event.start + 2, end=event.end + 2) for event in STEP.events]
    events, _ = written(STEP, Timeline(later, 1.5, 2))
    arrows: dict[int, dict[str, str]] = {}
    for k, event in enumerate(events):
        if event["ph"] in "sf":
            span = next(e for e in reversed(events[:k]) if e["ph"] == "X")  # the latest event in its row at this time
            assert (span["tid"], span["ts"], span["cat"]) == (event["tid"], event["ts"], event["cat"])
            arrows.setdefault(event["id"], {})[event["ph"]] = f"{span['name']} of {span['args']['mini-batch']}"
    pairs = [("forward (0, 0)", "forward (0, 1)"), ("backward (0, 1)", "backward (0, 0)")]
    assert sorted((a["s"], a["f"]) for a in arrows.values()) == sorted(
        (f"{source} of {k}", f"{target} of {k}") for source, target in pairs for k in range(2)
    )


def test_no_mini_batch() -> None:
    events, other = written()
    assert [e["ph"] for e in events] == ["M"] and other["bubble"] == 0
