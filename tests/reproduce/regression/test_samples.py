"""Samples: what is timed, with which clock; tests compare restarts; real differences are significant and large."""

import random
import threading
import time
from collections.abc import Callable

import pytest

from reproduce.numbers.compare import verdict
from reproduce.numbers.significance import Rule
from reproduce.regression import cases
from reproduce.regression.cases import CASES, TRAINING, WARM_UP, Case, Clock, Timed, prepare
from reproduce.regression.job import Samples, Settings
from reproduce.regression.main import TOGETHER, judge, least_restarts


@pytest.mark.parametrize("model", ["AmoebaNet-D", "U-Net"])
def test_the_three_configurations_at_equal_batch_size(model: str) -> None:
    three = [case for case in TRAINING if case.model == model]
    micro_batches = three[-1].m
    expected = [(2, 1, "never"), (1, micro_batches, "always"), (2, micro_batches, "except_last")]
    assert [(len(case.balance), case.m, case.checkpoint) for case in three] == expected and micro_batches > 1
    assert len({(case.batch, sum(case.balance)) for case in three}) == 1


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_trains(case: Case) -> None:
    assert [each.name for each in CASES].count(case.name) == 1
    step = prepare(case)
    first, second = float(step()), float(step())
    assert first != second, "the optimizer moved the parameters"
    assert float(prepare(case)()) == first, "both sides start from the same parameters and data"


def busy_thread() -> None:
    thread = threading.Thread(target=lambda: sum(range(10**6)))
    thread.start()
    thread.join()


@pytest.mark.parametrize(
    ("clock", "step", "least", "most"),
    [("cpu", lambda: time.sleep(0.05), 0.0, 0.01), ("cpu", busy_thread, 0.001, 50.0),
     ("wall", lambda: time.sleep(0.05), 0.05, 50.0)],
    ids=["waiting takes no CPU time", "CPU time is of all threads", "waiting takes time"],
)  # fmt: skip
def test_the_clocks(
    clock: Clock, step: Callable[[], None], least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cases, "prepare", lambda case: step)
    assert least <= Timed(TRAINING[0].name, clock, 0.0)() <= most


@pytest.mark.parametrize("slow_down", [0.0, 0.1, 0.5])
def test_a_planted_delay_is_a_share_of_the_usual_step(slow_down: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps advance the clock, the first ones more; reading it advances it a little."""
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


Ratio = float | Callable[[random.Random, int], float]  # of every restart, or of the i-th
SAME, SLOWER = 1.0, 1.1
DEFAULT = Settings([])


def made(
    ratio: Ratio, noise: float, restarts: int = DEFAULT.restarts, rounds: int = DEFAULT.rounds, seed: int = 0
) -> Samples:
    """Make samples: a ratio per restart, a common level per pair, and noise per sample."""
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


RATIOS: dict[str, tuple[Ratio, float, str]] = {
    "nothing changed": (SAME, 0.01, "~"),
    "nothing changed, some noise": (SAME, 0.1, "~"),
    "10 % slower": (SLOWER, 0.01, "worse"),
    "10 % slower, samples off by up to 30 %: all together": (SLOWER, 0.3, "worse"),
    "10 % quicker": (1 / 1.1, 0.01, "better"),
    "3 % slower: less than matters": (1.03, 0.005, "~"),
    "each process has a speed of its own": (lambda draw, i: draw.uniform(0.9, 1.1), 0.001, "~"),
    "10 % slower, and each process has its own": (lambda draw, i: 1.1 * draw.uniform(0.95, 1.05), 0.05, "worse"),
    "one restart went wrong": (lambda draw, i: 3.0 if i == 5 else 1.0, 0.05, "~"),
    "10 % slower, one restart went wrong": (lambda draw, i: 0.1 if i == 7 else 1.1, 0.01, "worse"),
}


@pytest.mark.parametrize("name", RATIOS)
def test_what_is_called_real(name: str) -> None:
    ratio, noise, expected = RATIOS[name]
    for seed in range(20):
        found = judge(eight(ratio, noise, seed), Rule())
        assert [*found.decisions] == [*"01234567", TOGETHER]
        verdicts = {verdict(decision, "time") for decision in found.decisions.values()}
        assert verdicts == {expected} or (noise > 0.2 and TOGETHER in found.worse), seed


def test_a_restart_gives_the_median_of_its_pairs() -> None:
    samples = Samples(base=[[1.0, 2.0, 4.0, 1.0]], head=[[2.0, 16.0, 400.0, 0.1]])
    assert judge({"a": samples}, Rule()).decisions["a"].ratio == pytest.approx(4.0)


@pytest.mark.parametrize(("cases", "alpha", "restarts"), [(1, 0.01, 8), (8, 0.01, 11), (8, 0.05, 9), (2, 0.5, 4)])
def test_tests_share_alpha(cases: int, alpha: float, restarts: int) -> None:
    assert least_restarts(Rule(alpha), cases) == restarts
    judged = judge({str(k): made(SAME, 0.1) for k in range(cases)}, Rule(alpha))
    assert judged.rule.alpha == alpha / len(judged.decisions) and len(judged.decisions) == cases + (cases > 1)


def test_a_case_that_a_side_cannot_run_is_not_judged_and_takes_no_share() -> None:
    found = judge({"a": made(SLOWER, 0.001, restarts=8), "b": Samples(unable={"base": "ImportError: x"})}, Rule())
    assert [*found.decisions] == ["a"] == found.worse, "eight restarts are enough for one case, not for two"
