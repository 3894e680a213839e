"""Cases: what the regression times, and its clocks. Every one of them trains."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from reproduce.regression import cases
from reproduce.regression.cases import CASES, TRAINING, WARM_UP, Case, Clock, Timed, prepare


@pytest.mark.parametrize("model", ["AmoebaNet-D", "U-Net"])
def test_the_three_configurations_at_equal_batch_size(model: str) -> None:
    naive, checkpoint_only, gpipe = (case for case in TRAINING if case.model == model)
    assert (naive.n, naive.m, naive.checkpoint) == (2, 1, "never")
    assert (checkpoint_only.n, checkpoint_only.m, checkpoint_only.checkpoint) == (1, gpipe.m, "always")
    assert (gpipe.n, gpipe.checkpoint) == (2, "except_last") and gpipe.m > 1
    assert naive.batch == checkpoint_only.batch == gpipe.batch
    assert sum(naive.balance) == sum(checkpoint_only.balance) == sum(gpipe.balance)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_trains(case: Case) -> None:
    assert [each.name for each in CASES].count(case.name) == 1
    step = prepare(case)
    first, second = float(step()), float(step())
    assert first != second, "the optimizer moved the parameters"
    assert float(prepare(case)()) == first, "both sides start from the same parameters and data"


def busy() -> None:
    until = time.thread_time() + 0.02
    while time.thread_time() < until:
        pass


def busy_thread() -> None:
    thread = threading.Thread(target=busy)
    thread.start()
    thread.join()


@pytest.mark.parametrize(
    ("clock", "step", "least", "most"),
    [
        ("cpu", lambda: time.sleep(0.05), 0.0, 0.01),
        ("cpu", busy_thread, 0.02, 0.5),
        ("wall", lambda: time.sleep(0.05), 0.05, 50.0),
    ],
    ids=["waiting takes no CPU time", "CPU time is of all threads", "waiting takes time"],
)
def test_the_clocks(
    clock: Clock, step: Callable[[], None], least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cases, "prepare", lambda case: step)
    assert least <= Timed(TRAINING[0].name, clock, 0.0)() <= most


@pytest.mark.parametrize("slow_down", [0.0, 0.1, 0.5])
def test_a_planted_delay_is_a_share_of_the_usual_step(slow_down: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes only in steps, the first of which are slow, and a little whenever it is read."""
    now, steps = 0.0, 0

    def clock() -> float:
        nonlocal now
        now += 1e-6
        return now

    def step() -> None:
        nonlocal now, steps
        steps += 1
        now += 1.0 if steps > WARM_UP * case.steps else 9.0

    case = CASES[0]
    monkeypatch.setattr(cases, "prepare", lambda case: step)
    monkeypatch.setitem(cases.CLOCKS, "cpu", clock)
    assert case.steps > 1 and Timed(case.name, "cpu", slow_down)() == pytest.approx(1 + slow_down, rel=1e-3)
