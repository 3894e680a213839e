"""Test two numbers that the GPU benchmark of overlap computes from the timeline of a step.

One is the share of the copies' time in which tasks run, too. The other is the share of
recomputations that start before their gradient arrives.
"""

import time
from pathlib import Path

import pytest

from benchmarks.gpu import overlap
from benchmarks.gpu.part import Context
from torchgpipe.schedules import Kind
from torchgpipe.schedules.replay import Event, Timeline


def timeline(*events: tuple[Kind, int, int, float, float]) -> Timeline:
    made = [Event(*event) for event in events]
    return Timeline(made, max(event.end for event in made), 2)


def test_copies_are_hidden_while_a_task_runs() -> None:
    step = timeline(
        ("forward", 0, 0, 0.0, 2.0),
        ("copy", 0, 0, 1.0, 4.0),  # a task runs until 2.0, and from 3.5 on
        ("forward", 1, 0, 1.5, 2.0),
        ("forward", 0, 1, 3.5, 6.0),
        ("copy", 1, 0, 6.0, 7.0),
    )
    assert overlap.hidden(step) == pytest.approx(1.5 / 4.0)
    assert overlap.hidden(timeline(("forward", 0, 0, 0.0, 1.0))) == 0.0


def test_recomputations_ahead_of_their_gradients_are_counted() -> None:
    step = timeline(
        ("recompute", 1, 0, 0.0, 1.0),
        ("recompute", 1, 1, 0.0, 1.0),  # not counted, because it is on the last partition
        ("backward", 1, 1, 1.0, 2.0),
        ("backward", 0, 1, 2.0, 3.0),
        ("recompute", 0, 0, 3.5, 4.0),  # after the gradient is there
    )
    assert overlap.ahead(step) == 0.5


def test_a_step_is_replayed_with_its_own_times() -> None:
    """Check three simulations of a recorded step, with the recorded times of tasks and copies.

    The first simulation has two features of the library that save time. Each other simulation
    leaves out one feature, and so must take longer:

    - Without "dependency", a recomputation cannot start before its gradient arrives.
    - Without "streams", copies do not run at the same time as tasks.
    """
    events: list[tuple[Kind, int, int, float, float]] = []
    now = 0.0
    seconds: dict[Kind, float] = {"forward": 1.0, "recompute": 1.0, "backward": 2.0}
    for kind, each in seconds.items():
        for i in range(overlap.M):
            for j in (0, 1):
                events.append((kind, i, j, now, now + each))
                now += each
    events.append(("copy", 0, 0, 0.0, 0.5))
    step = timeline(*events)

    whole = overlap.replayed(step, ("dependency", "streams")).seconds
    late = overlap.replayed(step, ("streams",)).seconds
    blocking = overlap.replayed(step, ("dependency",)).seconds

    m = overlap.M
    forwards = m * 1.0 + 0.5 + 1.0
    backwards = m * 3.0 + 0.5 + 2.0  # the first partition has recomputed one task ahead
    assert whole == forwards + backwards
    assert late == forwards + backwards + 1.0
    assert blocking > whole
    assert whole < step.seconds


def test_a_dry_run(tmp_path: Path) -> None:
    context = Context("overlap", "tiny", tmp_path, time.monotonic() + 60)

    result = overlap.run(context)

    assert len(result["rows"]) == 2 * len(overlap.COMPONENTS)
    for values in result["rows"].values():
        assert 0 < values["replayed"] <= values["one after another"]
    host_first, gpu_first = overlap.lines(result)
    assert host_first.startswith("host, then GPU: nothing ")
    assert gpu_first.startswith("GPU, then host: nothing ")
    assert (tmp_path / "host-then-GPU-dependency-streams.json").is_file()
