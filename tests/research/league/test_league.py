"""Predictions of the league are what the program makes of its tables today."""

from __future__ import annotations

import pytest

from reproduce.records.record import load
from research.league.__main__ import FOLDER, predicted

TABLES = sorted(path.stem for path in FOLDER.glob("*.json") if not path.stem.endswith("-predicted"))


def test_there_are_at_least_four() -> None:
    assert len(TABLES) >= 4


@pytest.mark.parametrize("name", ["dlperf-megatron", pytest.param("mpt", marks=pytest.mark.slow)])
def test_predictions_are_not_stale(name: str) -> None:
    made, kept = predicted(load(FOLDER / f"{name}.json")), load(FOLDER / f"{name}-predicted.json")
    assert [(x.row, x.over, x.hardware) for x in made.results] == [(x.row, x.over, x.hardware) for x in kept.results]
    for a, b in zip(made.results, kept.results, strict=True):
        assert a.values["throughput"] == pytest.approx(b.values["throughput"], rel=1e-4)
        assert a.values["allocated"] == pytest.approx(b.values["allocated"], rel=1e-4)
