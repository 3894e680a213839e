"""Tests of how the command `regression` times two versions of a package, and how it judges them.

A sample is the time of a step. The command restarts the timed processes several times, because the
speed of a process differs from start to start. One version counts as slower only if the difference
is large enough, and if a significance test over the restarts rules out chance.
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
from reproduce.regression import timed
from reproduce.regression.cases import CASES, OVERLAP
from reproduce.regression.job import Samples
from reproduce.regression.judge import (
    ALSO,
    TOGETHER,
    WALL,
    WALL_TOGETHER,
    Limits,
    complaint,
    judge,
    least_restarts,
)
from reproduce.regression.table import nearest
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
    """Check that each benchmark case is timed by its own clock, on its own number of cores.

    The clock counts wall time or CPU time. In this test, one process runs two cases.
    """
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
    """Check that a planted delay makes a step longer by `slow_down` times the usual time of a step.

    In this test, a fake clock advances by 1 s in a usual step, and by 9 s in a warm-up step. The
    clock also advances a little whenever it is read. Otherwise, a delay that waits for the clock
    would never end.
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
    """Make random samples (times of steps) of two revisions.

    Args:
        ratio: How many times as long the second revision takes: a number, or a function that
            returns this ratio for a restart of the processes.
        noise: The largest random change of a sample, as a share of the sample.
        restarts: The number of restarts.
        rounds: The number of samples in each restart. In each round, the machine has another speed.
        seed: The seed of the random numbers.
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


FIVE = Limits(threshold=0.05)

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
def test_what_is_called_real(name: str, pytestconfig: pytest.Config) -> None:
    ratio, noise, expected = RATIOS[name]
    for seed in range(20 if pytestconfig.getoption("all") else 8):
        found = judge(eight(ratio, noise, seed), FIVE)
        assert list(found.decisions["base"]) == [*"01234567", TOGETHER]
        verdicts = {verdict(decision, "time") for decision in found.decisions["base"].values()}
        if noise < 0.2:
            assert verdicts == {expected}, seed
        else:
            assert verdicts == {expected} or TOGETHER in found.worse, seed


def overlapping(ratio: Ratio, noise: float = 0.01, busy: int = 0) -> dict[str, Samples]:
    """Make samples (times of steps) of the cases that measure how well tasks overlap.

    These cases are timed by the wall clock.

    Args:
        ratio: How many times as long the second revision takes.
        noise: The largest random change of a sample, as a share of the sample.
        busy: In how many of 20 restarts other programs use the cores.
    """
    found = {}
    for k, case in enumerate(OVERLAP):
        samples = made(ratio, noise, seed=9 + k)
        found[case.name] = replace(samples, clock="wall", busy=[i < busy for i in range(20)])
    return found


def test_overlap_is_a_family_of_its_own() -> None:
    """Check that the cases that measure how well tasks overlap have a mean of their own.

    These cases are timed by the wall clock, and must not change the mean of the other cases. All
    significance tests share the allowed risk of a false alarm. The risk of each test is the total
    risk divided by the number of tests.
    """
    others = eight(SAME, 0.01)
    overlap = overlapping(SLOWER)

    alone = judge(others, Limits())
    found = judge(others | overlap, Limits())

    assert found.worse == [*overlap, WALL_TOGETHER]
    tests = len(others) + len(overlap) + 2
    assert found.alpha == Limits().alpha / tests
    ratio = found.decisions["base"][TOGETHER].ratio
    assert ratio == alone.decisions["base"][TOGETHER].ratio


def test_wall_clock_has_a_wider_threshold() -> None:
    between = 1 + Limits().threshold * (1 + WALL) / 2
    assert judge(overlapping(between, 0.001), Limits()).worse == []
    cases = {case: replace(each, clock="cpu") for case, each in overlapping(between, 0.001).items()}
    assert judge(cases, Limits()).worse == [*cases, TOGETHER]


@pytest.mark.parametrize(
    ("ratio", "busy", "expected"),
    [(SAME, 5, "~"), (SAME, 6, "disturbed"), (1 / 1.1, 6, "disturbed"), (SLOWER, 20, "worse")],
)
def test_a_busy_machine_may_hide_a_loss(ratio: float, busy: int, expected: str) -> None:
    found = judge(overlapping(ratio, busy=busy), Limits())
    assert {verdict(each, "time") for each in found.decisions["base"].values()} == {expected}
    wrong = complaint(found, "old", "new", None)
    if expected == "~":
        assert wrong is None
    else:
        assert wrong is not None
        assert wrong.exit_code == (1 if expected == "worse" else 2)
        assert ("other programs used the cores" in str(wrong)) == (expected == "disturbed")


def test_times_that_vary_too_much_are_not_judged() -> None:
    samples = {"a": Samples(base=[[1.0]] * 20, head=[[0.4], [2.5]] * 10, busy=[False] * 20)}
    wrong = complaint(judge(samples, Limits()), "old", "new", None)
    assert wrong is not None
    assert wrong.exit_code == 2
    assert str(wrong).startswith("cannot tell: the times of a vary so much that the ends of the")


def test_cpu_time_is_judged_on_a_busy_machine() -> None:
    samples = {"a": replace(made(SAME, 0.01), busy=[True] * 20)}
    assert complaint(judge(samples, Limits()), "old", "new", None) is None


@pytest.mark.parametrize(
    ("since", "said"),
    [(1 + WALL * ALSO * 0.9, None), (1 + WALL * ALSO * 1.1, "worse than v1: overlap never, ")],
)
def test_many_small_losses_add_up(since: float, said: str | None) -> None:
    """Check that many small losses of speed, one in each new version, are found in the end.

    Each loss is too small to be found by a comparison with the version before. The option `--also`
    names a much older version. The comparison with the much older version finds the sum of all
    losses. Its threshold is larger than that of the usual comparison.
    """
    samples = {}
    for case, each in overlapping(since, 0.001).items():
        samples[case] = replace(each, base=each.head, also=each.base)
    found = judge(samples, Limits())
    wrong = complaint(found, "main", "new", "v1")
    assert found.worse == []
    if said is None:
        assert wrong is None
    else:
        assert str(wrong).startswith(said)


def test_a_restart_gives_the_median_of_its_pairs() -> None:
    samples = Samples(base=[[1.0, 2.0, 4.0, 1.0]], head=[[2.0, 16.0, 400.0, 0.1]])
    decision = judge({"a": samples}, Limits()).decisions["base"]["a"]
    assert decision.ratio == pytest.approx(4.0)
    shown = nearest(samples.base, samples.head, decision.ratio)
    assert shown == (1.0, 2.0), "a pair near the ratio; the medians are 1.5 and 9"


@pytest.mark.parametrize(
    ("cases", "alpha", "olds", "restarts"),
    [(1, 0.01, 1, 8), (8, 0.01, 1, 11), (8, 0.05, 1, 9), (2, 0.5, 1, 4), (8, 0.01, 2, 12)],
)
def test_tests_share_alpha(cases: int, alpha: float, olds: int, restarts: int) -> None:
    names: dict[str, Clock] = {str(k): "cpu" for k in range(cases)}
    assert least_restarts(Limits(alpha), names, olds) == restarts
    tests = cases + 1 if cases > 1 else 1  # the mean of all cases is a test, too
    samples = {str(k): made(SAME, 0.1) for k in range(cases)}
    if olds == 2:
        samples = {name: replace(each, also=each.base) for name, each in samples.items()}
    judged = judge(samples, Limits(alpha))
    assert len(judged.decisions["base"]) == tests
    assert judged.alpha == alpha / (olds * tests)
