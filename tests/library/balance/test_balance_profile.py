"""Check what a profile counts as the time and as the bytes of a layer.

The tests also compare the balance of `minimise_heaviest` with all other possible balances. Wrong
arguments are tested in test_balance.py.
"""

import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import (
    BatchNorm1d,
    Flatten,
    Identity,
    Linear,
    Module,
    Parameter,
    ReLU,
    Sequential,
    Sigmoid,
)

from torchgpipe.balance import balance_by_size, balance_by_time, profile
from torchgpipe.balance.minimise import minimise_heaviest
from torchgpipe.plan import plan

from ...behaviours.parts.layers import Do
from ..layers import Lambda, Pop, Stash
from ..simulated import CLOCK, Clock, Spend

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
KiB = 256  # KiB in float32 numbers

X = torch.zeros(2, 2, requires_grad=True)


def test_layers_take_turns_until_the_timeout(clock: Clock) -> None:
    model = Sequential(Spend(1, 2, "a"), Spend(3, 4, "b"))
    balance_by_time(2, model, X, timeout=65.0, device="cpu")
    a, b = ["a forward", "a backward"], ["b forward", "b backward"]
    runs = 1 + profile.RUNS_PER_COPY
    # For the layer `a`, a forward and a backward take 3 seconds together, and for `b` 7 seconds.
    # Profiling times each layer several times, and then begins again with the first layer. The
    # timeout of 65 seconds ends this second round after the first timed run of `b`.
    assert clock.history == runs * a + runs * b + runs * a + 2 * b
    assert clock.now == 66.0


def test_one_disturbed_run_does_not_count(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    spend = clock.spend
    calls = 0

    def spend_disturbed(seconds: float, what: str) -> None:
        nonlocal calls
        calls += 1
        spend(seconds + 500 if calls == 3 else seconds, what)

    monkeypatch.setattr(clock, "spend", spend_disturbed)
    layers = [Spend(1) for _ in range(4)]
    model = Sequential(*layers)
    balance = balance_by_time(2, model, torch.zeros(1), timeout=1e3, device="cpu")
    assert balance == [2, 2]


# Tests of layers' bytes


def expand(numbers: int) -> Module:
    return Lambda(lambda x: x.repeat(1, numbers).square().mean(1, keepdim=True))


def parameters(size: int) -> Module:
    weight = Parameter(torch.zeros(size))
    return Do(lambda self, x: x + self.weight.sum(), weight=weight)


EXPANDING = [expand(scale * KiB) for scale in range(1, 7)]
GROWING = [parameters(scale * KiB) for scale in range(1, 7)]
# Six layers that save at most 64 KiB each, and one layer with a parameter of 32 KiB.
BOTH = [expand(KiB)] * 6 + [parameters(32 * KiB)]


# Each value has layers, the number of samples, options, and the expected balance by size.
SIZES: dict[str, tuple[list[Module], int, dict[str, Any], list[int]]] = {
    "activations": (EXPANDING, 64, {"param_scale": 0}, [4, 2]),
    "parameters": (GROWING, 1, {"param_scale": 100}, [4, 2]),
    "both": (BOTH, 64, {"param_scale": 1.0}, [3, 4]),
    "small micro-batches": (BOTH, 64, {"param_scale": 1.0, "chunks": 64}, [6, 1]),
    "parameters count much": (BOTH, 64, {"param_scale": 64.0}, [6, 1]),
}


@pytest.mark.parametrize("device", [*DEVICES, "meta"])
@pytest.mark.parametrize("layers, samples, options, balance", SIZES.values(), ids=SIZES)
def test_balance_by_size(
    layers: list[Module], samples: int, options: dict[str, Any], balance: list[int], device: str
) -> None:
    sample = torch.rand(samples, 1, requires_grad=True)
    model = Sequential(*layers)
    assert balance_by_size(2, model, sample, device=device, **options) == balance


LINEAR_AND_NORM = Sequential(Linear(8, 8), BatchNorm1d(8))
# Each value has three parts: a layer; whether the layer's input, of shape (4, 8), requires grad;
# and how many bytes the layer's forward keeps for backward. These bytes are given as a multiple of
# the bytes of the input.
KEPT: dict[str, tuple[Module, bool, float]] = {
    "nothing made": (Identity(), True, 0),
    "a view": (Flatten(), True, 0),
    "in place": (ReLU(inplace=True), True, 0),
    "output": (Lambda(lambda x: x + 1), True, 1),
    "output saved for backward, once": (Lambda(torch.exp), True, 1),
    "input saved, output only handed on": (Lambda(torch.sin), True, 1),
    "input saved twice": (Lambda(lambda x: x * x), True, 1),
    "between": (Lambda(lambda x: (x + 1).exp().sin()), True, 2),
    "between, without gradient": (Lambda(lambda x: (x + 1).exp().sin()), False, 1),
    # Forward keeps the outputs of both layers, and a mean and a deviation for each channel. Weights
    # and running statistics exist already, and so they do not count.
    "no parameters, no buffers": (LINEAR_AND_NORM, False, 2 + 2 / 4),
    "views of one storage": (Lambda(lambda x: tuple((x + 1).unbind())), True, 1),
    "a part keeps the whole": (Lambda(lambda x: (x + 1)[:1]), True, 1),
    "integers": (Lambda(lambda x: x.argsort()), False, 2),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("layer, requires_grad, times", KEPT.values(), ids=KEPT)
def test_kept_bytes(layer: Module, requires_grad: bool, times: float, device: str) -> None:
    sample = torch.rand(4, 8, requires_grad=requires_grad)
    sizes = profile.profile_sizes(Sequential(layer), sample, 1, 0, torch.device(device))
    assert sizes == [times * sample.nbytes]


def test_the_first_micro_batch_counts_and_stashed_tensors_where_they_are_made() -> None:
    device = torch.device("cpu")
    sigmoid = Sequential(Sigmoid())
    # If 13 samples are split into 8 micro-batches, the first micro-batch has 2 samples.
    sizes = profile.profile_sizes(sigmoid, torch.rand(13, 5), 8, 0, device)
    assert sizes == [2 * 5 * 4]

    sample = torch.rand(4, 8)
    layers = Sequential(Stash(lambda x: x + 1), Pop(lambda x, skip: skip))
    sizes = profile.profile_sizes(layers, sample, 1, 0, device)
    assert sizes == [sample.nbytes, 0]


# Tests for CUDA that need no GPU


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that records the calls of `synchronize`, of the clock and of layers."""
    calls: list[str] = []

    def note(name: str, answer: Any = None) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            calls.append(name)
            return answer

        return noted

    monkeypatch.setattr(torch.accelerator, "synchronize", note("synchronize"))
    monkeypatch.setattr(profile, "perf_counter", note("clock", 0.0))
    monkeypatch.setattr(CLOCK, "spend", lambda seconds, what: calls.append(what))
    return calls


def test_the_clock_is_read_when_the_device_is_idle(calls: list[str]) -> None:
    def copy() -> Module:
        calls.append("copy")
        return Spend(0, 0, "a")

    rehearsal = profile.Rehearsal(Identity(), X, {}, copy)
    device = torch.device("cuda")
    read = ["synchronize", "clock"]
    profile.time_run(rehearsal, device)
    assert calls == ["copy", *read, "a forward", *read, *read, "a backward", *read]
    calls.clear()
    profile.time_forward(rehearsal, device)
    assert calls == [*read, "a forward", *read]


def heaviest(costs: Sequence[float | Fraction], balance: Sequence[int]) -> Fraction:
    """Return the cost of the most expensive partition of a balance, as an exact fraction."""
    assert sum(balance) == len(costs)
    partitions = []
    begin = 0
    for layers in balance:
        exact = [Fraction(cost) for cost in costs[begin : begin + layers]]
        partitions.append(sum(exact, start=Fraction(0)))
        begin += layers
    return max(partitions)


def least_heaviest(costs: Sequence[float | Fraction], partitions: int) -> Fraction:
    """Try all balances, and return the lowest cost that their most expensive partition can have."""
    found = []
    for cuts in combinations(range(1, len(costs)), partitions - 1):
        bounds = [0, *cuts, len(costs)]
        balance = [end - begin for begin, end in pairwise(bounds)]
        found.append(heaviest(costs, balance))
    return min(found)


THIRD = Fraction(1, 3)


# Each row has the costs of layers, the number of partitions, and the best balance.
CASES: list[tuple[list[float | Fraction], int, list[int]]] = [
    ([1, 2, 3, 4, 5, 6], 2, [4, 2]),
    # Partitions that are filled up to the average cost, 4, would leave a partition of cost 8.
    ([1, 4, 4, 1, 1, 1], 3, [2, 1, 3]),
    # One layer is the heaviest partition. The remaining layers are split evenly.
    ([1, 1, 1, 1, 100], 3, [2, 2, 1]),
    ([100, 1, 1, 1, 1], 3, [1, 2, 2]),
    ([1] * 7, 4, [1, 2, 2, 2]),
    # Half of the total cost is 1.5. A cut after the second layer has a cost of 2 before it, which
    # is nearest to 1.5. If the half were rounded down to 1, a cut after the first layer would be
    # as near, as it has a cost of 0 before it.
    ([0, 2, 1], 2, [2, 1]),
    # Layers of cost 0 are split by their number, even if all layers have cost 0.
    ([0] * 6, 3, [2, 2, 2]),
    ([0, 0, 0, 5, 0, 0, 0], 7, [1] * 7),
    ([5, 0, 0, 0, 5], 2, [2, 3]),
    ([THIRD, THIRD, 2 * THIRD], 2, [2, 1]),
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
    """Check that 5000 layers are balanced over 64 partitions as evenly as possible.

    The check fills partitions one after another, each to just below the cost of the most expensive
    partition of the balance. If this takes more than 64 partitions, no balance of 64 partitions is
    better.
    """
    generator = random.Random(decades)
    costs = []
    for _ in range(5000):
        factor = generator.random()
        exponent = generator.uniform(-decades, decades)
        costs.append(factor * 10.0**exponent)

    balance = minimise_heaviest(costs, 64)

    assert len(balance) == 64
    assert min(balance) >= 1
    bound = heaviest(costs, balance)
    parts = 1
    filled = Fraction(0)
    for cost in map(Fraction, costs):
        if filled + cost >= bound:
            parts += 1
            filled = Fraction(0)
        filled += cost
    assert parts > 64 or max(costs) == bound


def test_autocast_does_not_keep_the_converted_weights_of_copies() -> None:
    """Check that layers are timed without autocast's cache, which would grow with each copy."""
    caches = set()

    def watch(_: Module, x: Tensor) -> Tensor:
        caches.add(torch.is_autocast_cache_enabled())
        return x

    model = Sequential(Linear(2, 2), Do(watch), Linear(2, 2))
    x = torch.zeros(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        balance_by_time(2, model, x, timeout=0.0, device="cpu")
        assert torch.is_autocast_cache_enabled()
    plan(model, x, batch_size=2, devices=1, autocast=torch.bfloat16)
    assert caches == {False}
