"""Test what `compare --fail-on-regression` says of results that cannot be judged."""

import pytest

from reproduce.error import Error
from reproduce.numbers.gate import Gate


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (3, "missing in B: row0, row1, row2$"),
        (20, r"missing in B: row0, row1, row2 and 17 more \(--all names them\)$"),
    ],
)
def test_of_a_long_list_the_first_rows_are_named(count: int, said: str) -> None:
    names = [f"row{k}" for k in range(count)]
    found = Gate([], set(), {"time"}, unjudged={"missing in B": names}, unfair=[])
    with pytest.raises(Error, match=said):
        found.check(allow_missing=False)
