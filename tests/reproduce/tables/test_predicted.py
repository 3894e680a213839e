"""Predicted: how far predictions are from the published rows, in throughput, in speed-up and in bytes."""

from __future__ import annotations

from typing import Any

import pytest

from reproduce.records.record import Record, Result
from reproduce.tables.predicted import predicted_tables

SPEED = {"n2m1": {"throughput": 20.0}, "n2m4": {"throughput": 40.0}}
MEMORY = {"pipeline-1": {"allocated": [9 * 2**30, 2**33], "model": 2**34}}


@pytest.mark.parametrize(
    ("published", "gpu", "values", "expected"),
    [
        (
            "tg-amoebanetd-speed",
            "Tesla P40",
            SPEED,
            ["n2m4", "41.1", "40.0", "-3%", "1.54", "2.00", "+30.0%", "not run"],
        ),
        ("tg-amoebanetd-speed", "another", SPEED, ["n2m4", "41.1", "40.0", "1.54", "2.00", "not run"]),
        ("tg-unet-memory", "Tesla P40", MEMORY, ["pipeline-1", "20.5", "17.0", "83%", "16.0", "22%", "9.0  8.0"]),
    ],
)
def test_rows(published: str, gpu: str, values: dict[str, dict[str, Any]], expected: list[str]) -> None:
    results = [
        Result("e", row, "predicted", "paper", "meta", published=f"{published}/{row}", values=own)
        for row, own in values.items()
    ]
    record = Record("r", "T", "predicted", {}, results, hardware={"name": "h", "title": f"8 x NVIDIA {gpu}"})
    (table,) = predicted_tables(record, {})
    assert list(table.rows[-1]) == expected
