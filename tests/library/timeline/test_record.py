"""Test recorded timelines, which say when each task of a pipeline began and ended.

A timeline is divided into mini-batches. It says how long devices waited (the bubble), puts the
clocks of all ranks together, and can be saved to a file for Perfetto, a viewer of traces.
"""

import json
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from torchgpipe import GPipe
from torchgpipe.plan.predict.replay import Event, Timeline
from torchgpipe.schedules import make
from torchgpipe.timeline import Recording, record
from torchgpipe.timeline.perfetto import perfetto
from torchgpipe.timeline.record import ahead_of_first, mini_batches

from ...plain import piped
from ..layers import linears


def pipeline(n: int) -> Any:
    return piped(linears(n), [1] * n, 2, checkpoint="never", engine="graph")


def test_the_bubble_of_whole_mini_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the bubble of two mini-batches, with a clock that advances by 1 s when it is read.

    Each mini-batch has 8 tasks. As a result, each task takes 1 s, and 1 s passes between two tasks.
    """
    model = pipeline(2)
    ticks = count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    with record(model) as recording:
        for _ in range(2):
            model(torch.rand(2, 2)).sum().backward()
    first, second = recording.steps
    assert first.seconds == 15
    assert second.seconds == 15
    assert second.bubble == pytest.approx(1 - 8 / 30)
    bubbles = "bubble 73.3% (partition 0 73.3%, partition 1 73.3%)"
    assert str(recording) == f"2 mini-batches, 30 s: {bubbles}"

    events = [
        Event("forward", 1, 0, 1.0, 2.0),
        Event("forward", 0, 0, 5.0, 6.0),
        Event("forward", 1, 0, 7.0, 8.0),
    ]
    (step,) = mini_batches(events, [0])
    assert step.events == [("forward", 0, 0, 0.0, 1.0), ("forward", 1, 0, 2.0, 3.0)]
    assert step.seconds == 3
    assert str(Recording()) == "no mini-batch was recorded"
    over_ranks = str(Recording([step], 0.00025, over_ranks=True))
    assert over_ranks.endswith("33.3% (rank 0 33.3%); clocks agree to 0.25 ms")


@pytest.mark.parametrize(
    ("file", "observer", "error"),
    [
        ("t.json", print, ValueError),
        ("none/t.json", None, FileNotFoundError),
        ("t.json", None, None),
    ],
)
def test_refuses_before_anything_is_trained(
    file: str, observer: Any, error: Any, tmp_path: Path
) -> None:
    model = pipeline(1)
    model.observer = observer
    path = tmp_path / file
    entered = False
    try:
        with record(model, path):
            entered = True
    except Exception as raised:
        assert type(raised) is error
        assert not entered
    assert entered == (error is None)
    assert path.exists() == entered
    assert model.observer is observer


def clock_stamps(values: list[list[tuple[float, float]]]) -> list[Tensor]:
    return [torch.tensor(each, dtype=torch.float64) for each in values]


# Each row has three items:
# 1. How many seconds rank 1's clock is ahead of rank 0's clock.
# 2. A list of exchanges of messages. Each has the times at which the two ranks send, and the
#    seconds for which the two messages travel.
# 3. The bound that must be returned for the error of the measured difference, in seconds.


@pytest.mark.parametrize(
    ("ahead", "rounds", "error"),
    [
        (0.0, [((1.0, 1.0), (0.5, 0.5))], 0.5),
        (-3.0, [((1.0, 1.0), (0.0, 0.5))], 0.25),
        (100.0, [((1.0, 1.0), (9.0, 9.0)), ((20.0, 20.0), (0.125, 0.25))], 0.1875),
        (100.0, [((1.0, 1.0), (0.125, 9.0)), ((20.0, 20.0), (9.0, 0.25))], 0.1875),
        (100.0, [((1.0, 2.0), (0.5, 0.5))], 0.75),
    ],
)
def test_two_clocks(
    ahead: float, rounds: list[tuple[tuple[float, float], tuple[float, float]]], error: float
) -> None:
    stamps: list[list[tuple[float, float]]] = [[], []]
    for (first, second), (there, back) in rounds:
        stamps[0].append((first, max(first, second + back)))
        stamps[1].append((second + ahead, max(second, first + there) + ahead))
    (zero, found), most = ahead_of_first(clock_stamps(stamps))
    assert zero == 0
    assert most == error
    assert abs(found - ahead) <= error

    largest: list[list[tuple[float, float]]] = [[(0.0, 2.0)], [(10.0, 12.0)], [(0.0, 8.0)]]
    assert ahead_of_first(clock_stamps(largest)) == ([0.0, 10.0, 3.0], 5.0)


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
    names = [(e["name"], e["tid"], e["args"]["name"]) for e in events if e["ph"] == "M"]
    assert names == [
        ("process_name", 0, "a title"),
        ("thread_name", 1, "rank 0"),
        ("thread_name", 3, "rank 1"),
        ("thread_name", 2, "rank 0, copies"),
    ]
    spans = [e for e in events if e["ph"] == "X"]
    for span, task in zip(spans, TASKS, strict=True):
        assert (span["name"], span["tid"], span["ts"], span["dur"]) == task
    assert spans[4]["args"] == {"mini-batch": 0, "micro-batch": 0, "partition": 1}
    assert other["step_seconds"] == [1.75]
    assert other["bubble"] == 0.55
    assert other["bubbles"] == [0.6, 0.5]
    assert other["clock_error"] == 0.5
    assert len(other) == 4

    (event,), other = written()
    assert event["ph"] == "M"
    assert other["bubble"] == 0


def test_arrows_lead_to_the_task_that_needs_the_result() -> None:
    later = [event._replace(start=event.start + 2, end=event.end + 2) for event in STEP.events]
    events, _ = written(STEP, Timeline(later, 1.5, 2))
    sources: dict[int, str] = {}
    targets: dict[int, str] = {}
    span: Any = None
    for event in events:
        if event["ph"] == "X":
            span = event
        elif event["ph"] in "sf":
            # In the list of events, an arrow follows its task and has the task's place and time.
            for key in ("tid", "ts", "cat"):
                assert event[key] == span[key]
            ends = sources if event["ph"] == "s" else targets
            ends[event["id"]] = f"{span['name']} of {span['args']['mini-batch']}"
    assert sources.keys() == targets.keys()
    found = {(source, targets[arrow]) for arrow, source in sources.items()}
    expected = set()
    for k in range(2):
        expected.add((f"forward (0, 0) of {k}", f"forward (0, 1) of {k}"))
        expected.add((f"backward (0, 1) of {k}", f"backward (0, 0) of {k}"))
    assert found == expected
    assert len(sources) == len(expected)


def test_arrows_are_numbered_as_tasks_start() -> None:
    step = make("1F1B", 3, 6).replay()
    step.events.sort(key=lambda event: event.start)
    events, _ = written(step)
    arrows = [event["id"] for event in events if event["ph"] == "f"]
    assert arrows == list(range(2 * 2 * 6))


def test_a_step_of_several_stages_on_a_device_in_halves(tmp_path: Path) -> None:
    name = "ZBVZeroBubble"
    options: dict[str, Any] = {"chunks": 4, "checkpoint": "never", "schedule": name}
    model = GPipe(linears(4), [1] * 4, devices=["cpu"] * 2, **options)
    file = tmp_path / "t.json"

    with record(model, file) as recording:
        model.step(lambda y, _: y.mean(), torch.rand(4, 2), None)

    (step,) = recording.steps
    ran: list[Any] = [[], []]
    for event in sorted(step.tasks, key=lambda event: event.start):
        ran[step.row(event)].append(event[:3])
    for actions, expected in zip(ran, make(name, 2, 4).lists, strict=True):
        assert actions == list(expected)
    assert step.partitions == 2
    assert recording.row == "device"
    events = json.loads(file.read_text())["traceEvents"]
    names = set()
    arrows = 0
    for event in events:
        names.add(event["name"])
        arrows += event["ph"] == "s"
    assert {"backward of inputs (0, 3)", "backward of weights (0, 3)"} <= names
    assert arrows == 2 * 3 * 4
