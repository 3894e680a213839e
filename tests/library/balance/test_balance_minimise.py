"""`minimise_heaviest`: exact, no empty partitions, even if there is a choice. Misuse: test_balance.py."""

import random
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchgpipe.balance.minimise import minimise_heaviest


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
