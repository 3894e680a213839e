"""Profiles: what counts as a layer's time and bytes. `minimise_heaviest`: exact, also if there is a choice.

Misuse is in test_balance.py.
"""

import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate, combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from torchgpipe.balance import balance_by_size, balance_by_time, profile
from torchgpipe.balance.minimise import minimise_heaviest

from ...behaviours.parts.layers import Do
from ..layers import Lambda, Pop, Stash
from ..simulated import CLOCK, Clock, Spend

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
KiB = 256  # numbers of float32


X = torch.zeros(2, 2, requires_grad=True)


def test_layers_take_turns_until_the_timeout(clock: Clock) -> None:
    model = nn.Sequential(Spend(1, 2, "a"), Spend(3, 4, "b"))
    balance_by_time(2, model, X, timeout=65.0, device="cpu")
    a, b = ["a forward", "a backward"], ["b forward", "b backward"]
    runs = 1 + profile.RUNS_PER_COPY
    # A round takes 3 + 7 seconds a run. The second ends early, after the first run that b is timed for.
    assert clock.history == runs * a + runs * b + runs * a + 2 * b
    assert clock.now == 66.0


def test_one_disturbed_run_does_not_count(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    disturbed = iter([False, False, True])
    spend = clock.spend
    monkeypatch.setattr(
        clock, "spend", lambda s, what: spend(s + 500 * next(disturbed, False), what)
    )
    model = nn.Sequential(*(Spend(1) for _ in range(4)))
    assert balance_by_time(2, model, torch.zeros(1), timeout=1e3, device="cpu") == [2, 2]


# bytes


def expand(numbers: int) -> nn.Module:
    """Return a layer that saves so many numbers per sample for its backward."""
    return Lambda(lambda x: x.repeat(1, numbers).square().mean(1, keepdim=True))


def parameters(size: int) -> nn.Module:
    return Do(lambda self, x: x + self.weight.sum(), weight=nn.Parameter(torch.zeros(size)))


# Layers, a sample that requires grad, and the balance by size over two partitions, with options.
SIZES: dict[str, tuple[list[nn.Module], int, dict[str, Any], list[int]]] = {
    "activations": ([expand(scale * KiB) for scale in range(1, 7)], 64, {"param_scale": 0}, [4, 2]),
    "parameters": (
        [parameters(scale * KiB) for scale in range(1, 7)],
        1,
        {"param_scale": 100},
        [4, 2],
    ),
    # 6 activations of 64 KiB at most against 1 parameter of 32 KiB.
    "both": ([*[expand(KiB)] * 6, parameters(32 * KiB)], 64, {"param_scale": 1.0}, [3, 4]),
    "small micro-batches": (
        [*[expand(KiB)] * 6, parameters(32 * KiB)],
        64,
        {"param_scale": 1.0, "chunks": 64},
        [6, 1],
    ),
    "parameters count much": (
        [*[expand(KiB)] * 6, parameters(32 * KiB)],
        64,
        {"param_scale": 64.0},
        [6, 1],
    ),
}


@pytest.mark.parametrize("device", [*DEVICES, "meta"])
@pytest.mark.parametrize("layers, samples, options, balance", SIZES.values(), ids=SIZES)
def test_balance_by_size(
    layers: list[nn.Module], samples: int, options: dict[str, Any], balance: list[int], device: str
) -> None:
    sample = torch.rand(samples, 1, requires_grad=True)
    assert balance_by_size(2, nn.Sequential(*layers), sample, device=device, **options) == balance


# A function of a (4, 8) input, whether the input requires grad, and the saved bytes in units of the input's.
KEPT: dict[str, tuple[nn.Module, bool, float]] = {
    "nothing made": (nn.Identity(), True, 0),
    "a view": (nn.Flatten(), True, 0),
    "in place": (nn.ReLU(inplace=True), True, 0),
    "output": (Lambda(lambda x: x + 1), True, 1),
    "output saved for backward, once": (Lambda(torch.exp), True, 1),
    "input saved, output only handed on": (Lambda(torch.sin), True, 1),
    "input saved twice": (Lambda(lambda x: x * x), True, 1),
    "between": (Lambda(lambda x: (x + 1).exp().sin()), True, 2),
    "between, without gradient": (Lambda(lambda x: (x + 1).exp().sin()), False, 1),
    # Two outputs, and the mean and deviation of every channel; neither weight nor running statistics.
    "no parameters, no buffers": (
        nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)),
        False,
        2 + 2 / 4,
    ),
    "views of one storage": (Lambda(lambda x: tuple((x + 1).unbind())), True, 1),
    "a part keeps the whole": (Lambda(lambda x: (x + 1)[:1]), True, 1),
    "integers": (Lambda(lambda x: x.argsort()), False, 2),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("layer, requires_grad, times", KEPT.values(), ids=KEPT)
def test_kept_bytes(layer: nn.Module, requires_grad: bool, times: float, device: str) -> None:
    sample = torch.rand(4, 8, requires_grad=requires_grad)
    sizes = profile.profile_sizes(nn.Sequential(layer), sample, 1, 0, torch.device(device))
    assert sizes == [times * sample.nbytes]


def test_the_first_micro_batch_counts_and_stashed_tensors_where_they_are_made() -> None:
    sample, device = torch.rand(4, 8), torch.device("cpu")
    assert profile.profile_sizes(nn.Sequential(nn.Sigmoid()), torch.rand(13, 5), 8, 0, device) == [
        2 * 5 * 4
    ]
    layers = nn.Sequential(Stash(lambda x: x + 1), Pop(lambda x, skip: skip))
    assert profile.profile_sizes(layers, sample, 1, 0, device) == [sample.nbytes, 0]


# CUDA, as far as it can be tested without a GPU


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record calls in order."""
    calls: list[str] = []

    def note(name: str, answer: Any = None) -> Callable[..., Any]:
        return lambda *args: (calls.append(name), answer)[1]  # type: ignore[func-returns-value]

    monkeypatch.setattr(torch.accelerator, "synchronize", note("synchronize"))
    monkeypatch.setattr(profile, "perf_counter", note("clock", 0.0))
    monkeypatch.setattr(CLOCK, "spend", lambda seconds, what: calls.append(what))
    return calls


def test_the_clock_is_read_when_the_device_is_idle(calls: list[str]) -> None:
    rehearsal = profile.Rehearsal(
        nn.Identity(), X, {}, lambda: (calls.append("copy"), Spend(0, 0, "a"))[1]
    )  # type: ignore[func-returns-value]
    read = ["synchronize", "clock"]
    profile.time_run(rehearsal, torch.device("cuda"))
    assert calls == ["copy", *read, "a forward", *read, *read, "a backward", *read]
    calls.clear()
    profile.time_forward(rehearsal, torch.device("cuda"))
    assert calls == [*read, "a forward", *read]


def heaviest(costs: Sequence[float | Fraction], balance: Sequence[int]) -> Fraction:
    """Return the exact cost of the heaviest partition."""
    assert sum(balance) == len(costs)
    sums = list(accumulate((Fraction(cost) for cost in costs), initial=Fraction(0)))
    return max(sums[b] - sums[a] for a, b in pairwise(accumulate(balance, initial=0)))


def least_heaviest(costs: Sequence[float | Fraction], partitions: int) -> Fraction:
    """Return the smallest cost of a heaviest partition, by trying every balance."""
    cuts = combinations(range(1, len(costs)), partitions - 1)
    balances = ([b - a for a, b in pairwise((0, *between, len(costs)))] for between in cuts)
    return min(heaviest(costs, balance) for balance in balances)


# costs, partitions, balance
CASES: list[tuple[list[float | Fraction], int, list[int]]] = [
    ([1, 2, 3, 4, 5, 6], 2, [4, 2]),
    # Cutting at the average, 4, would make a partition of cost 8.
    ([1, 4, 4, 1, 1, 1], 3, [2, 1, 3]),
    # One layer is the heaviest partition; the others are split evenly.
    ([1, 1, 1, 1, 100], 3, [2, 2, 1]),
    ([100, 1, 1, 1, 1], 3, [1, 2, 2]),
    ([1] * 7, 4, [1, 2, 2, 2]),
    # The middle of 3 is no integer; rounded down, a cut at 0 would seem as near to it as one at 2.
    ([0, 2, 1], 2, [2, 1]),
    # Layers of cost 0 are split by their number, also if there are no others.
    ([0] * 6, 3, [2, 2, 2]),
    ([0, 0, 0, 5, 0, 0, 0], 7, [1] * 7),
    ([5, 0, 0, 0, 5], 2, [2, 3]),
    ([Fraction(1, 3), Fraction(1, 3), Fraction(2, 3)], 2, [2, 1]),
]


@pytest.mark.parametrize("costs, partitions, balance", CASES)
def test_balance(costs: list[float | Fraction], partitions: int, balance: list[int]) -> None:
    assert minimise_heaviest(costs, partitions) == balance


COSTS = st.one_of(
    st.integers(0, 2),
    st.integers(0, 5),
    st.integers(0, 10**6),
    st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.7, 1.0]),
    st.floats(0, allow_nan=False, allow_infinity=False),
)


@given(st.data())
def test_no_balance_is_lighter(data: st.DataObject) -> None:
    costs = data.draw(st.lists(COSTS, min_size=1, max_size=9))
    partitions = data.draw(st.integers(1, len(costs)))
    balance = minimise_heaviest(costs, partitions)
    assert len(balance) == partitions
    assert min(balance) >= 1
    assert heaviest(costs, balance) == least_heaviest(costs, partitions)


@pytest.mark.parametrize("decades", [0, 1, 12, 300], ids="decades={}".format)
def test_thousands_of_layers(decades: int) -> None:
    """The largest promised size. Filling partitions greedily below the best bound would need more than 64."""
    generator = random.Random(decades)
    costs = [generator.random() * 10.0 ** generator.uniform(-decades, decades) for _ in range(5000)]
    balance = minimise_heaviest(costs, 64)
    assert len(balance) == 64 and min(balance) >= 1
    parts, filled, bound = 1, Fraction(0), heaviest(costs, balance)
    for cost in map(Fraction, costs):
        if filled + cost >= bound:
            parts, filled = parts + 1, Fraction(0)
        filled += cost
    assert parts > 64 or max(costs) == bound
