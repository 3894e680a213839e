"""Choosing rows by name: only they are left, in every scale, and a wrong name is refused."""

from __future__ import annotations

import pytest

from reproduce.error import Error
from reproduce.experiments import EXPERIMENTS
from reproduce.experiments.choose import choose_rows

SPEED, MEMORY = EXPERIMENTS["unet-speed"], EXPERIMENTS["unet-memory"]


def test_rows_by_name() -> None:
    assert choose_rows([SPEED, MEMORY], ()) == [SPEED, MEMORY]
    speed, memory = choose_rows([SPEED, MEMORY], ("pipeline-2", "GPipe n2m4"))
    for scale in ("paper", "small"):
        assert [row.name for row in speed.scale(scale).rows] == ["pipeline-2", "GPipe n2m4"]
        assert [row.name for row in memory.scale(scale).rows] == ["pipeline-2"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("#",), "--row '#': no row is called so; there are baseline, pipeline-1"),
        (("naive n2",), "--row: unet-memory has none of the rows naive n2; leave it out"),
    ],
)
def test_a_wrong_name_is_refused(names: tuple[str, ...], message: str) -> None:
    with pytest.raises(Error, match=message):
        choose_rows([SPEED, MEMORY], names)
