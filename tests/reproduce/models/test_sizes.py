"""Sizes are checked in one line that says what was given and what to give instead."""

from __future__ import annotations

import pytest

from reproduce.models.sizes import check_size

FITS = [
    (1, {}),
    (6, {"multiple_of": 3}),
    (2, {"least": 2}),
    (12, {"multiple_of": 4, "least": 10}),
]

DOES_NOT_FIT = [
    (0, {}, "size must be at least 1, got 0: use 1, for example"),
    (-7, {}, "size must be at least 1, got -7: use 1, for example"),
    (1, {"least": 2, "why": "halved"}, "size must be at least 2 (halved), got 1: use 2, for example"),
    (0, {"multiple_of": 3}, "size must be a positive multiple of 3, got 0: use 3, for example"),
    (20, {"multiple_of": 3}, "size must be a positive multiple of 3, got 20: use 21, for example"),
    (19, {"multiple_of": 3}, "size must be a positive multiple of 3, got 19: use 18, for example"),
]


@pytest.mark.parametrize("value, rule", FITS)
def test_size_that_fits_is_silent(value, rule):
    check_size("size", value, **rule)


@pytest.mark.parametrize("value, rule, message", DOES_NOT_FIT)
def test_size_that_does_not_fit(value, rule, message):
    with pytest.raises(ValueError) as caught:
        check_size("size", value, **rule)
    assert str(caught.value) == message


@pytest.mark.parametrize("value", [6.0, "6", None, True])
def test_not_a_whole_number(value):
    with pytest.raises(TypeError, match=r"^size must be a whole number"):
        check_size("size", value)
