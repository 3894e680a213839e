"""Interleaving: one side at a time, in random order, both warm, anew at each restart; and what a side cannot run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import reproduce.regression.interleave as interleaving
from reproduce.error import Error
from reproduce.regression.cases import MACHINERY, Case
from reproduce.regression.interleave import NAMES, Fork, Side, Timed, interleave

ROOT = Path(__file__).resolve().parents[3]


class Fake:
    """A side that notes what it is asked, and answers with made-up seconds."""

    def __init__(self, name: str, log: list[str], unable: dict[str, str]) -> None:
        self.name, self.log, self.unable, self.warm = name, log, unable, set[str]()
        self.asked: str | None = None
        log.append(f"start {name}")

    def send(self, case: str) -> None:
        assert self.asked is None
        self.asked = case
        self.log.append(f"send {self.name} {case}")

    def receive(self) -> float | str | None:
        case, self.asked = self.asked, None
        assert case is not None
        self.log.append(f"receive {self.name} {case}")
        if case in self.unable:
            return self.unable[case]
        if case in self.warm:
            return 1.0 if self.name == "base" else 2.0
        self.warm.add(case)
        return None

    def close(self) -> None:
        self.log.append(f"close {self.name}")


def sides(log: list[str], **unable: dict[str, str]) -> Callable[[int], Side]:
    return lambda i: Fake(NAMES[i], log, unable.get(NAMES[i], {}))


def run(log: list[str], *, restarts: int = 3, rounds: int = 20, **unable: dict[str, str]) -> list[dict[str, object]]:
    return list(interleave(sides(log, **unable), ["a", "b"], restarts=restarts, rounds=rounds, seed=0))


def test_samples_by_restart_and_case() -> None:
    lines = run([], restarts=2, rounds=3)
    assert lines == [
        {"case": case, "restart": restart, "base": [1.0] * 3, "head": [2.0] * 3}
        for restart in range(2)
        for case in ("a", "b")
    ]


def test_both_are_started_and_warm_before_any_sample_and_end_with_the_restart() -> None:
    log: list[str] = []
    run(log)
    assert log.count("start base") == log.count("start head") == 3
    one = log[: log.index("close head") + 1]
    assert sorted(one[:2]) == ["start base", "start head"] and one[-2:] == ["close base", "close head"]
    assert [line.split()[2] for line in one[2:10:4]] == ["a", "b"], "every case is asked of both for the first time"
    assert {line.split()[1] for line in one[2:10]} == {"base", "head"}
    assert len(one) == 2 + 8 + 2 * 20 * 4 + 2


def test_one_side_at_a_time_and_each_first_about_as_often() -> None:
    log: list[str] = []
    run(log, restarts=1, rounds=50)
    timed = log[10:-2]
    asked = timed[::2]
    assert timed[1::2] == [line.replace("send", "receive") for line in asked], "an answer before the next question"
    pairs = list(zip(asked[::2], asked[1::2], strict=True))
    assert all(one.split()[2] == other.split()[2] and one != other for one, other in pairs), "pairs of one case"
    first = sum(one.startswith("send base") for one, _ in pairs)
    assert 35 <= first <= 65 and len(pairs) == 100
    assert len({line.split()[1] for line in asked[::4]}) == 2, "not in a fixed order either"


@pytest.mark.parametrize("name", NAMES)
def test_a_case_that_a_side_cannot_run_is_told_once_and_left_out(name: str) -> None:
    log: list[str] = []
    lines = run(log, restarts=2, rounds=1, **{name: {"a": "ImportError: no such thing"}})
    assert lines[0] == {"case": "a", "unable": {name: "ImportError: no such thing"}}
    assert [line["case"] for line in lines[1:]] == ["b", "b"]
    assert sum(line == f"send {name} a" for line in log) == 1


def test_sides_end_when_one_breaks() -> None:
    log: list[str] = []

    class Broken(Fake):
        def receive(self) -> float | str | None:
            return "Error: gone" if super().receive() == 1.0 else None

    with pytest.raises(Error, match=r"a ran before, and no longer does in (base|head): "):
        list(interleave(lambda i: Broken(NAMES[i], log, {}), ["a"], restarts=1, rounds=1, seed=0))
    assert log[-2:] == ["close base", "close head"]


def test_what_ran_before_and_cannot_run_at_a_later_restart_is_an_error() -> None:
    """It may be memory or processes that ran short; to leave the case out would hide it."""
    log: list[str] = []

    class Short(Fake):
        def receive(self) -> float | str | None:
            found = super().receive()
            return "MemoryError" if log.count("start base") == 2 and self.name == "base" else found

    lines = interleave(lambda i: Short(NAMES[i], log, {}), ["a"], restarts=3, rounds=1, seed=0)
    assert next(lines)["restart"] == 0
    with pytest.raises(Error, match="a ran before, and no longer does in base: MemoryError"):
        next(lines)
    assert log[-2:] == ["close base", "close head"]


def test_restarts_that_follow_others() -> None:
    log: list[str] = []
    lines = list(interleave(sides(log), ["a"], restarts=2, rounds=1, seed=0, first=5))
    assert [line["restart"] for line in lines] == [5, 6]
    with pytest.raises(Error, match="a ran before, and no longer does in head: gone"):
        list(interleave(sides(log, head={"a": "gone"}), ["a"], restarts=2, rounds=1, seed=0, first=5))


@pytest.mark.parametrize("what", ["start", "send"])
def test_who_comes_first_is_drawn_for_each_restart(what: str) -> None:
    log: list[str] = []
    run(log, restarts=40, rounds=1)
    ends = [i for i, line in enumerate(log) if line == "close head"]
    begins = [0, *(end + 1 for end in ends[:-1])]
    firsts = [next(line.split()[1] for line in log[begin:] if line.startswith(what)) for begin in begins]
    assert len(firsts) == 40 and 10 <= firsts.count("base") <= 30


@pytest.mark.parametrize("ask", [lambda fork: fork.send("a"), lambda fork: fork.receive()])
def test_a_process_that_ended_by_itself(ask: Callable[[Fork], object], tmp_path: Path) -> None:
    fork = Fork(tmp_path)
    try:
        fork._process.kill()
        fork._process.join()
        with pytest.raises(Error, match="a measuring process ended by itself"):
            ask(fork)
    finally:
        fork.close()


class Clock:
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
    clock = Clock()

    def prepare(case: Case) -> Callable[[], None]:
        def step() -> None:
            clock.now += 1.0

        return step

    monkeypatch.setattr(interleaving, "prepare", prepare)
    monkeypatch.setattr(interleaving.time, "perf_counter", clock)
    case = Case("a", "linear", (1,), 1, "never", 1, steps=4)
    assert Timed(case, slow_down).sample() == pytest.approx(seconds, rel=1e-3)


def interleaved(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "reproduce.regression.interleave", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_each_side_runs_the_torchgpipe_that_it_was_given(tmp_path: Path) -> None:
    """For real: a base from before there was a GPipe, beside this one."""
    package = tmp_path / "torchgpipe"
    package.mkdir()
    (package / "__init__.py").write_text("")
    name = MACHINERY[0].name
    done = interleaved(tmp_path, ROOT, "--case", name, "--restarts", "2", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    (line,) = map(json.loads, done.stdout.splitlines())
    assert line["case"] == name and list(line["unable"]) == ["base"]
    assert line["unable"]["base"].startswith("ImportError: cannot import name 'GPipe' from 'torchgpipe'")


@pytest.mark.slow
def test_real_samples() -> None:
    name = MACHINERY[0].name
    done = interleaved(ROOT, ROOT, "--case", name, "--restarts", "2", "--rounds", "3")
    assert done.returncode == 0 and done.stderr == ""
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["restart"] for line in lines] == [0, 1]
    for line in lines:
        assert len(line["base"]) == len(line["head"]) == 3 and min(line["base"] + line["head"]) > 0
