"""Tests of the samples that `regression` takes: what is timed, with which clock, and the verdicts.

Significance tests compare restarts. A difference counts if it is significant and large.
"""

import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reproduce.error import Error
from reproduce.numbers.compare import verdict
from reproduce.numbers.significance import Rule
from reproduce.regression import timed
from reproduce.regression.cases import CASES, OVERLAP
from reproduce.regression.job import Samples
from reproduce.regression.main import TOGETHER, WALL_TOGETHER, _row, judge, least_restarts
from reproduce.regression.timed import CORES, WARM_UP, Case, Clock, Timed


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_trains(case: Case) -> None:
    assert [each.name for each in CASES].count(case.name) == 1
    step: Any = case.prepare()
    first, second = float(step()), float(step())
    assert first != second, "the optimizer moved the parameters"
    other_step: Any = case.prepare()
    assert other_step() == first, "both sides start from the same parameters and data"


@pytest.mark.parametrize(
    "text", ["", "1 / 0", "CASES = []", "CASES = [1]", "CASES = [Case('a', int), Case('a', id)]"]
)
def test_a_file_without_cases_of_their_own_names(text: str, tmp_path: Path) -> None:
    file = tmp_path / "cases.py"
    file.write_text(f"from reproduce.regression.timed import Case\n{text}")
    with pytest.raises(Error, match=r"^--cases /.*: .*Error: .*; it needs CASES, a list of"):
        timed.load(file)


@pytest.mark.parametrize(
    ("own", "clock", "cores"), [("cpu", None, 1), ("wall", None, 2), ("wall", "cpu", 1)]
)
def test_each_case_has_its_clock_and_cores(
    own: Clock, clock: Clock | None, cores: int, monkeypatch: Any
) -> None:
    """Each case has its own clock and number of cores, also if one process runs several cases."""
    before = os.sched_getaffinity(0)
    counts: list[int] = []

    def count_cores() -> None:
        counts.append(len(os.sched_getaffinity(0)))

    case = Case("a", lambda: count_cores, clock=own)
    monkeypatch.setattr(timed, "load", lambda _: {"a": case})
    now, other_clock = time.perf_counter, "cpu"
    if cores == 1:
        now, other_clock = time.process_time, "wall"
    try:
        one = Timed("", "a", clock, 0.0)
        other = Timed("", "a", other_clock, 0.0)  # type: ignore[arg-type]
        counts.clear()
        one()
        other()
    finally:
        os.sched_setaffinity(0, before)
    assert counts[0] == min(cores, len(CORES))
    assert one.now == now


@pytest.mark.parametrize("slow_down", [0.0, 0.1, 0.5])
def test_a_planted_delay_is_a_share_of_the_usual_step(
    slow_down: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted delay makes a step longer by `slow_down` times the usual time of a step.

    In this test, a fake clock advances by 1 s in a usual step, and by 9 s in a warm-up step. The
    clock also advances a little whenever it is read, so that the delay ends.
    """
    now, steps = 0.0, 0

    def clock() -> float:
        nonlocal now
        now += 1e-6
        return now

    def step() -> None:
        nonlocal now, steps
        steps += 1
        now += 1.0 if steps > WARM_UP * case.steps else 9.0

    case = Case("a", lambda: step, steps=4)
    monkeypatch.setattr(timed, "load", lambda _: {"a": case})
    monkeypatch.setitem(timed.CLOCKS, "cpu", clock)
    delayed = Timed("", "a", "cpu", slow_down)
    assert delayed() == pytest.approx(1 + slow_down, rel=1e-3)


Ratio = float | Callable[[random.Random, int], float]
"""The ratio of every restart, or a function that returns the ratio of the i-th restart."""
SAME, SLOWER = 1.0, 1.1


def made(ratio: Ratio, noise: float, restarts: int = 20, rounds: int = 8, seed: int = 0) -> Samples:
    """Make random samples of two revisions, in which the second takes `ratio` times as long.

    Each restart of the processes has its own ratio. Each pair of samples has its own speed of the
    machine, and each sample has noise.
    """
    draw = random.Random(seed)
    samples = Samples()
    for i in range(restarts):
        of_restart = ratio if isinstance(ratio, float) else ratio(draw, i)
        levels = [draw.uniform(0.5, 2.0) for _ in range(rounds)]
        base = [level * draw.uniform(1 - noise, 1 + noise) for level in levels]
        head = [of_restart * level * draw.uniform(1 - noise, 1 + noise) for level in levels]
        samples.base.append(base)
        samples.head.append(head)
    return samples


def eight(ratio: Ratio, noise: float, seed: int = 0) -> dict[str, Samples]:
    """Make samples of eight cases."""
    return {str(k): made(ratio, noise, seed=100 * seed + k) for k in range(8)}


RATIOS: dict[str, tuple[Ratio, float, str]] = {
    "nothing changed": (SAME, 0.01, "~"),
    "nothing changed, some noise": (SAME, 0.1, "~"),
    "10 % slower": (SLOWER, 0.01, "worse"),
    "10 % slower, samples off by up to 30 %: all together": (SLOWER, 0.3, "worse"),
    "10 % quicker": (1 / 1.1, 0.01, "better"),
    "3 % slower: less than matters": (1.03, 0.005, "~"),
    "each process has a speed of its own": (lambda draw, i: draw.uniform(0.9, 1.1), 0.001, "~"),
    "10 % slower, and each process has its own": (
        lambda draw, i: 1.1 * draw.uniform(0.95, 1.05),
        0.05,
        "worse",
    ),
    "one restart went wrong": (lambda draw, i: 3.0 if i == 5 else 1.0, 0.05, "~"),
    "10 % slower, one restart went wrong": (lambda draw, i: 0.1 if i == 7 else 1.1, 0.01, "worse"),
}


@pytest.mark.parametrize("name", RATIOS)
def test_what_is_called_real(name: str) -> None:
    ratio, noise, expected = RATIOS[name]
    for seed in range(20):
        found = judge(eight(ratio, noise, seed), Rule())
        assert list(found.decisions) == [*"01234567", TOGETHER]
        verdicts = {verdict(decision, "time") for decision in found.decisions.values()}
        if noise < 0.2:
            assert verdicts == {expected}, seed
        else:
            assert verdicts == {expected} or TOGETHER in found.worse, seed


def test_overlap_is_a_family_of_its_own() -> None:
    """Overlap cases (which measure wall-clock time) do not change the verdicts on other cases.

    Even if all overlap cases are slower, the mean and the significance level of the other cases
    stay the same.
    """
    others = eight(SAME, 0.01)
    overlap = {}
    for k, case in enumerate(OVERLAP):
        slower = made(SLOWER, 0.01, seed=9 + k)
        overlap[case.name] = replace(slower, clock="wall")

    alone = judge(others, Rule())
    found = judge(others | overlap, Rule())

    assert found.worse == [*overlap, WALL_TOGETHER]
    assert found.rule.alpha == Rule().alpha / 9
    assert found.decisions[TOGETHER] == alone.decisions[TOGETHER]


def test_a_restart_gives_the_median_of_its_pairs() -> None:
    samples = Samples(base=[[1.0, 2.0, 4.0, 1.0]], head=[[2.0, 16.0, 400.0, 0.1]])
    decision = judge({"a": samples}, Rule()).decisions["a"]
    assert decision.ratio == pytest.approx(4.0)
    row = _row("a", samples, decision)
    shown = [reading and reading.middle for reading in row.readings]
    assert shown == [1000, 2000], "of a pair near the ratio; the medians are 1500 and 9000"


@pytest.mark.parametrize(
    ("cases", "alpha", "restarts"), [(1, 0.01, 8), (8, 0.01, 11), (8, 0.05, 9), (2, 0.5, 4)]
)
def test_tests_share_alpha(cases: int, alpha: float, restarts: int) -> None:
    assert least_restarts(Rule(alpha), cases) == restarts
    tests = cases + 1 if cases > 1 else 1  # the mean of all cases is a test, too
    samples = {str(k): made(SAME, 0.1) for k in range(cases)}
    judged = judge(samples, Rule(alpha))
    assert len(judged.decisions) == tests
    assert judged.rule.alpha == alpha / tests
