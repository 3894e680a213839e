"""Interleaving: one side at a time, in turn, both warm, anew at each restart; and what a side cannot run."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import reproduce.regression.interleave as interleaving
from reproduce.error import Error
from reproduce.regression.cases import Case, Clock
from reproduce.regression.interleave import NAMES, Timed, fork, interleave

ROOT = Path(__file__).resolve().parents[3]
Texts = dict[tuple[str, int], str]  # what a side answers instead of seconds: by the case, and how many answers it gave


class Fake:
    """A side that notes what it is asked, and answers with made-up seconds."""

    def __init__(self, name: str, log: list[str], texts: Texts) -> None:
        self.name, self.log, self.texts, self.warm = name, log, texts, set[str]()
        self.asked: str | None = None

    def send(self, case: str) -> None:
        assert self.asked is None, "an answer before the next question"
        self.asked = case
        self.log.append(f"ask {self.name} {case}")

    def recv(self) -> float | str | None:
        case, self.asked = self.asked, None
        assert case is not None
        self.log.append(f"answer {self.name} {case}")
        before = self.log.count(f"answer {self.name} {case}") - 1
        if (case, before) in self.texts:
            return self.texts[case, before]
        if case in self.warm:
            return 1.0 if self.name == "base" else 2.0
        self.warm.add(case)
        return None


def run(
    log: list[str], *, restarts: int = 3, rounds: int = 20, first: int = 0, **texts: Texts
) -> Iterator[dict[str, Any]]:
    @contextlib.contextmanager
    def start(i: int) -> Iterator[Any]:
        log.append(f"start {NAMES[i]}")
        try:
            yield Fake(NAMES[i], log, texts.get(NAMES[i], {}))
        finally:
            log.append(f"end {NAMES[i]}")

    return interleave(start, ["a", "b"], restarts=restarts, rounds=rounds, seed=0, first=first)


def test_samples_by_restart_and_case() -> None:
    assert list(run([], restarts=2, rounds=3, first=5)) == [
        {"case": case, "restart": restart, "base": [1.0] * 3, "head": [2.0] * 3}
        for restart in (5, 6)
        for case in ("a", "b")
    ]


def test_both_are_warm_before_any_sample_and_end_with_the_restart() -> None:
    log: list[str] = []
    list(run(log))
    assert log.count("start base") == log.count("start head") == 3
    one = log[: len(log) // 3]
    assert sorted(one[:2]) == ["start base", "start head"] and sorted(one[-2:]) == ["end base", "end head"]
    for case, asked in (("a", one[2:6]), ("b", one[6:10])):
        assert sorted(asked) == sorted(f"{what} {name} {case}" for what in ("ask", "answer") for name in NAMES)
    assert len(one) == 2 + 8 + 2 * 20 * 4 + 2


def test_pairs_of_a_case_follow_each_other_and_the_sides_take_turns_to_be_first() -> None:
    log: list[str] = []
    list(run(log, restarts=1, rounds=4))
    asked, answers = log[10:-2:2], log[11:-2:2]
    assert answers == [line.replace("ask", "answer") for line in asked], "one side at a time"
    for case, of_case in (("a", asked[:8]), ("b", asked[8:])):
        first, second = of_case[:2]
        assert {first, second} == {f"ask base {case}", f"ask head {case}"}
        assert of_case == [first, second, second, first] * 2


@pytest.mark.parametrize("place", [0, 2, 10, 12], ids=["start", "warm-up", "case a", "case b"])
def test_who_comes_first_is_drawn_for_each_restart(place: int) -> None:
    log: list[str] = []
    list(run(log, restarts=40, rounds=1))
    firsts = [line.split()[1] for line in log[place :: len(log) // 40]]
    assert len(firsts) == 40 and 10 <= firsts.count("base") <= 30


@pytest.mark.parametrize("name", NAMES)
def test_a_case_that_a_side_cannot_run_is_told_once_and_left_out(name: str) -> None:
    log: list[str] = []
    lines = list(run(log, restarts=2, rounds=1, **{name: {("a", 0): "ImportError: gone"}}))  # type: ignore[arg-type]
    assert lines[0] == {"case": "a", "unable": {name: "ImportError: gone"}}
    assert [line["case"] for line in lines[1:]] == ["b", "b"]
    assert log.count(f"ask {name} a") == 1


@pytest.mark.parametrize(
    ("answers", "first", "finished"),
    [(1, 0, []), (2, 0, ["a", "b"]), (0, 5, [])],
    ids=["a sample", "the warm-up of a later restart", "the first restart of a later process"],
)
def test_what_ran_before_and_no_longer_does_is_an_error(answers: int, first: int, finished: list[str]) -> None:
    """It may be memory or processes that ran short; to leave the case out would hide it."""
    log: list[str] = []
    lines = run(log, rounds=1, first=first, head={("a", answers): "MemoryError"})
    assert [next(lines)["case"] for _ in finished] == finished
    with pytest.raises(Error, match="a ran before, and no longer does in head: MemoryError"):
        next(lines)
    assert sorted(log[-2:]) == ["end base", "end head"]


@pytest.mark.parametrize("ask", [lambda side: side.send("a"), lambda side: side.recv()], ids=["asked", "to answer"])
def test_a_process_that_ended_by_itself(ask: Callable[[Connection], object], tmp_path: Path) -> None:
    def buffers() -> int:
        return sum(type(each) is memoryview for each in gc.get_objects())

    gc.collect()
    before = buffers()
    with pytest.raises(Error, match="a measuring process ended by itself") as caught, fork(tmp_path) as side:
        (process,) = multiprocessing.active_children()
        process.kill()
        process.join()
        ask(side)
    assert buffers() <= before, caught  # which may be kept for long: what could not be sent is not in its frames


@pytest.mark.parametrize(("clock", "cores"), [("cpu", 1), ("wall", len(os.sched_getaffinity(0)))])
def test_cpu_time_is_taken_on_one_core(clock: str, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"folders": ["", ""], "clock": clock, "slow_down": 0.0, "cases": [], "restarts": 0, "rounds": 1, "seed": 0}
    used: list[int] = []

    def fake(*_: object, **__: object) -> list[dict[str, Any]]:
        used.append(len(os.sched_getaffinity(0)))
        return []

    monkeypatch.setattr(interleaving, "interleave", fake)
    before = os.sched_getaffinity(0)
    try:
        interleaving.main(job)
    finally:
        os.sched_setaffinity(0, before)
        gc.unfreeze()
    assert used == [cores]


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
    monkeypatch.setattr(interleaving, "prepare", lambda case: step)
    assert least <= Timed(Case("a", "linear", (1,), 1, "never", 1), clock, 0.0).sample() <= most


class Time:
    """Time that passes only where it is told to, and a little whenever it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now


@pytest.mark.parametrize(("slow_down", "seconds"), [(0.0, 1.0), (0.1, 1.1), (0.5, 1.5)])
def test_a_planted_delay_is_a_share_of_the_usual_step(
    slow_down: float, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Time()

    def step() -> None:
        clock.now += 1.0

    monkeypatch.setattr(interleaving, "prepare", lambda case: step)
    monkeypatch.setitem(interleaving.CLOCKS, "cpu", clock)
    case = Case("a", "linear", (1,), 1, "never", 1, steps=4)
    assert Timed(case, "cpu", slow_down).sample() == pytest.approx(seconds, rel=1e-3)
