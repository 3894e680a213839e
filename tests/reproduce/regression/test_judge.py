"""Judging: restarts are the evidence, not samples; a difference is real if significant and large; cases share alpha."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from reproduce.numbers.compare import verdict
from reproduce.numbers.significance import Rule
from reproduce.regression.job import Samples, Settings
from reproduce.regression.judge import TOGETHER, judge, least_restarts, ratios, shared

Ratio = Callable[[random.Random, int], float]  # of the i-th restart


def slower_by_a_tenth(draw: random.Random, i: int) -> float:
    return 1.1


def made(ratio: Ratio, noise: float, restarts: int = 20, rounds: int = 4, seed: int = 0) -> Samples:
    """Make samples: each restart has its ratio, each pair a level that both share, and each sample noise of its own."""
    draw = random.Random(seed)
    samples = Samples()
    for i in range(restarts):
        of_restart = ratio(draw, i)
        levels = [draw.uniform(0.5, 2.0) for _ in range(rounds)]
        samples.base.append([level * draw.uniform(1 - noise, 1 + noise) for level in levels])
        samples.head.append([of_restart * level * draw.uniform(1 - noise, 1 + noise) for level in levels])
    return samples


CASES: dict[str, tuple[Ratio, float, str]] = {
    "nothing changed": (lambda draw, i: 1.0, 0.01, "~"),
    "nothing changed, some noise": (lambda draw, i: 1.0, 0.1, "~"),
    "10 % slower": (slower_by_a_tenth, 0.01, "worse"),
    "10 % quicker": (lambda draw, i: 1 / 1.1, 0.01, "better"),
    "3 % slower: less than matters": (lambda draw, i: 1.03, 0.005, "~"),
    "each process has a speed of its own": (lambda draw, i: draw.uniform(0.9, 1.1), 0.001, "~"),
    "10 % slower, and each process has its own": (lambda draw, i: 1.1 * draw.uniform(0.95, 1.05), 0.05, "worse"),
    "one restart went wrong": (lambda draw, i: 3.0 if i == 5 else 1.0, 0.05, "~"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_called_real(name: str) -> None:
    ratio, noise, expected = CASES[name]
    for seed in range(20):
        found = judge({str(k): made(ratio, noise, seed=100 * seed + k) for k in range(8)}, Rule())
        said = {verdict(each, "time") for each in (*(case.decision for case in found.cases), found.together) if each}
        assert said == {expected}, seed


@pytest.mark.parametrize(("ratio", "alarm"), [(1.0, False), (1.1, True)])
def test_an_alarm_under_much_noise(ratio: float, alarm: bool) -> None:
    """Single samples are off by up to 30 %: some cases may be missed, but not all of them together."""
    for seed in range(20):
        found = judge({str(k): made(lambda draw, i: ratio, 0.3, seed=100 * seed + k) for k in range(8)}, Rule())
        assert (TOGETHER in found.worse) == bool(found.worse) == alarm, seed


def test_a_single_case_that_got_slower_is_named() -> None:
    samples = {str(k): made(slower_by_a_tenth if k == 3 else lambda draw, i: 1.0, 0.05, seed=k) for k in range(8)}
    assert judge(samples, Rule()).worse == ["3"]


def test_all_pairs_of_one_restart_are_one_piece_of_evidence() -> None:
    """Hundreds of pairs of two processes, of which one happens to be slower, prove nothing."""
    judged = judge({"a": made(lambda draw, i: 1.2, 0.001, restarts=1, rounds=500)}, Rule())
    (found,) = judged.cases
    assert judged.together is None and judged.worse == []
    assert found.decision is not None and found.decision.outcome == "too few"
    assert found.decision.needed == least_restarts(Rule(), 1)


def test_a_restart_gives_the_median_of_its_pairs() -> None:
    samples = Samples(base=[[1.0, 2.0, 4.0, 1.0], [1.0]], head=[[2.0, 16.0, 400.0, 0.1], [3.0]])
    assert ratios(samples) == pytest.approx([4.0, 3.0])


@pytest.mark.parametrize(("cases", "tests"), [(1, 1), (2, 3), (8, 9)])
def test_tests_share_alpha(cases: int, tests: int) -> None:
    assert shared(Rule(0.01), cases) == Rule(0.01 / tests)


@pytest.mark.parametrize(("cases", "alpha", "restarts"), [(1, 0.01, 8), (8, 0.01, 11), (8, 0.05, 9), (2, 0.5, 4)])
def test_least_restarts(cases: int, alpha: float, restarts: int) -> None:
    assert least_restarts(Rule(alpha), cases) == restarts


def test_a_case_that_a_side_cannot_run_is_not_judged_and_takes_no_share() -> None:
    samples = made(slower_by_a_tenth, 0.001, restarts=8)
    found = judge({"a": samples, "b": Samples(unable={"base": "ImportError: x"})}, Rule())
    assert [each.decision is None for each in found.cases] == [False, True]
    assert found.worse == ["a"], "eight restarts are enough for one case, not for two"


def test_nothing_to_judge() -> None:
    found = judge({"a": Samples(unable={"base": "ImportError: x"})}, Rule())
    assert found.able == 0 and found.worse == [] and found.together is None


@pytest.mark.parametrize("odd", [0.1, 0.5, 10.0])
def test_by_default_one_restart_that_went_wrong_hides_nothing(odd: float) -> None:
    def ratio(draw: random.Random, i: int) -> float:
        return odd if i == 7 else 1.1

    default = Settings([])
    samples = {str(k): made(ratio, 0.01, default.restarts, default.rounds, seed=k) for k in range(8)}
    assert judge(samples, Rule()).worse == [*samples, TOGETHER]
