"""Judging: restarts are the evidence, not samples; a difference is real if significant and large; cases share alpha."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from reproduce.numbers.compare import verdict
from reproduce.numbers.significance import Rule
from reproduce.regression.job import Samples, Settings
from reproduce.regression.judge import TOGETHER, judge, least_restarts

Ratio = float | Callable[[random.Random, int], float]  # of every restart, or of the i-th
SAME, SLOWER = 1.0, 1.1
DEFAULT = Settings([])


def made(
    ratio: Ratio, noise: float, restarts: int = DEFAULT.restarts, rounds: int = DEFAULT.rounds, seed: int = 0
) -> Samples:
    """Make samples: each restart has its ratio, each pair a level that both share, and each sample noise of its own."""
    draw = random.Random(seed)
    samples = Samples()
    for i in range(restarts):
        of_restart = ratio if isinstance(ratio, float) else ratio(draw, i)
        levels = [draw.uniform(0.5, 2.0) for _ in range(rounds)]
        samples.base.append([level * draw.uniform(1 - noise, 1 + noise) for level in levels])
        samples.head.append([of_restart * level * draw.uniform(1 - noise, 1 + noise) for level in levels])
    return samples


def eight(ratio: Ratio, noise: float, seed: int = 0) -> dict[str, Samples]:
    """Make samples of eight cases."""
    return {str(k): made(ratio, noise, seed=100 * seed + k) for k in range(8)}


CASES: dict[str, tuple[Ratio, float, str]] = {
    "nothing changed": (SAME, 0.01, "~"),
    "nothing changed, some noise": (SAME, 0.1, "~"),
    "10 % slower": (SLOWER, 0.01, "worse"),
    "10 % quicker": (1 / 1.1, 0.01, "better"),
    "3 % slower: less than matters": (1.03, 0.005, "~"),
    "each process has a speed of its own": (lambda draw, i: draw.uniform(0.9, 1.1), 0.001, "~"),
    "10 % slower, and each process has its own": (lambda draw, i: 1.1 * draw.uniform(0.95, 1.05), 0.05, "worse"),
    "one restart went wrong": (lambda draw, i: 3.0 if i == 5 else 1.0, 0.05, "~"),
    "10 % slower, one restart went wrong": (lambda draw, i: 0.1 if i == 7 else 1.1, 0.01, "worse"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_called_real(name: str) -> None:
    ratio, noise, expected = CASES[name]
    for seed in range(20):
        found = judge(eight(ratio, noise, seed), Rule())
        assert [*found.decisions] == [*"01234567", TOGETHER]
        assert {verdict(decision, "time") for decision in found.decisions.values()} == {expected}, seed


@pytest.mark.parametrize(("ratio", "alarm"), [(SAME, False), (SLOWER, True)])
def test_an_alarm_under_much_noise(ratio: Ratio, alarm: bool) -> None:
    """Single samples are off by up to 30 %: some cases may be missed, but not all of them together."""
    for seed in range(20):
        found = judge(eight(ratio, 0.3, seed), Rule())
        assert (TOGETHER in found.worse) == bool(found.worse) == alarm, seed


def test_a_single_case_that_got_slower_is_named() -> None:
    assert judge({**eight(SAME, 0.05), "3": made(SLOWER, 0.05)}, Rule()).worse == ["3"]


def test_all_pairs_of_one_restart_are_one_piece_of_evidence() -> None:
    """Hundreds of pairs of two processes, of which one happens to be slower, prove nothing."""
    (decision,) = judge({"a": made(SLOWER, 0.001, restarts=1, rounds=500)}, Rule()).decisions.values()
    assert (decision.outcome, decision.needed) == ("too few", least_restarts(Rule(), 1))


def test_a_restart_gives_the_median_of_its_pairs() -> None:
    samples = Samples(base=[[1.0, 2.0, 4.0, 1.0]], head=[[2.0, 16.0, 400.0, 0.1]])
    assert judge({"a": samples}, Rule()).decisions["a"].ratio == pytest.approx(4.0)


@pytest.mark.parametrize(("cases", "alpha", "restarts"), [(1, 0.01, 8), (8, 0.01, 11), (8, 0.05, 9), (2, 0.5, 4)])
def test_tests_share_alpha(cases: int, alpha: float, restarts: int) -> None:
    assert least_restarts(Rule(alpha), cases) == restarts
    judged = judge({str(k): made(SAME, 0.1) for k in range(cases)}, Rule(alpha))
    assert judged.rule.alpha == alpha / len(judged.decisions) and len(judged.decisions) == cases + (cases > 1)


@pytest.mark.parametrize(("able", "worse"), [({}, []), ({"a": made(SLOWER, 0.001, restarts=8)}, ["a"])])
def test_a_case_that_a_side_cannot_run_is_not_judged_and_takes_no_share(
    able: dict[str, Samples], worse: list[str]
) -> None:
    found = judge({**able, "b": Samples(unable={"base": "ImportError: x"})}, Rule())
    assert [*found.decisions] == worse == found.worse, "eight restarts are enough for one case, not for two"
