"""What runs without `--slow` is worth something only if it is every pair."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from .conftest import covering

SIZES = [(2, 2, 3), (23, 2, 2, 3), (4, 5, 3, 2, 3), (1, 3, 1, 2)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_pair_is_there_in_few_rows(sizes: tuple[int, ...]) -> None:
    rows = [dict(enumerate(row)) for row in product(*map(range, sizes))]
    chosen = [rows[k] for k in covering(rows)]
    for a, b in combinations(range(len(sizes)), 2):
        assert {(row[a], row[b]) for row in chosen} == {*product(range(sizes[a]), range(sizes[b]))}
    one, other = sorted(sizes)[-2:]
    assert len(chosen) <= 1.5 * one * other
