"""The largest model that fits: found wherever it lies, and not claimed where the search ends before it."""

from __future__ import annotations

import pytest

from reproduce.predict import largest as module
from reproduce.predict.largest import Asked, Largest, largest
from torchgpipe.plan import load_hardware


@pytest.mark.parametrize(
    ("start", "limit", "sizes", "beyond"),
    [
        ((5, 64), 5, (5, 64), (6, 64)),
        ((5, 64), 4, (4, 64), (5, 64)),
        ((5, 64), 1, (1, 64), (2, 64)),
        ((5, 64), 97, (97, 64), (98, 64)),
        ((1, 64), 97, (97, 64), (98, 64)),
        ((5, 64), 0, None, (1, 64)),
        ((5, 64), 10**6, (320, 64), None),
    ],
)
def test_the_largest_that_fits(
    start: tuple[int, int], limit: int, sizes: tuple[int, int], beyond: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_fits", lambda asked, how, tried: tried[0] <= limit)
    monkeypatch.setattr(module, "_parameters", lambda asked, tried: 1000 * tried[0])
    asked = Asked("unet", start, 32, 8, 2.0**30, "sgd", load_hardware("p40x8"))
    tried: list[tuple[int, ...]] = []
    found = largest(asked, "naive", 0, tried.append)
    assert found == Largest(sizes, beyond, 0 if sizes is None else 1000 * sizes[0])
    assert len(set(tried)) == len(tried) < 16
