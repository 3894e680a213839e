"""Cards: the rates that their data sheets print, from cores and clock."""

from __future__ import annotations

import pytest

from research.p40.cards import GTX_1080_TI, TITAN_X, Card


@pytest.mark.parametrize(("card", "cores", "peak"), [(TITAN_X, 3584, 10.97e12), (GTX_1080_TI, 3584, 11.34e12)])
def test_the_peak_is_what_all_cores_do_at_the_clock_with_boost(card: Card, cores: int, peak: float) -> None:
    assert 128 * card.processors == cores
    assert card.peak == pytest.approx(peak, rel=1e-3)
