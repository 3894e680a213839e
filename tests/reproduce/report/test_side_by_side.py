"""SideBySide: what sources say of a published row stands on its line, each number under its own source."""

from __future__ import annotations

import pytest

from reproduce.records.record import Record
from reproduce.report.subjects import SideBySide, side_by_side

from .conftest import subject


def line(table: SideBySide, row: str) -> dict[tuple[str, str], str]:
    """Return a row's texts by heading and kind of source."""
    sources = {(name, source.kind): texts[row] for name, own in table.metrics.items() for source, texts in own}
    return {(name, "field"): texts[row] for name, texts in table.fields.items()} | sources


def test_speed(everything: list[Record]) -> None:
    table = side_by_side(subject(everything, "amoebanet-speed"))
    assert len(table.rows) == 9
    texts = line(table, "n2m4")
    assert [texts[name, "field"] for name in ("n", "m", "batch")] == ["2", "4", "256"]
    assert [texts["samples/s", kind] for kind in ("published", "predicted")] == ["41.1", "45.2"]
    assert [texts["speed-up", kind] for kind in ("published", "predicted")] == ["1.54", "1.54"]
    assert float(texts["samples/s", "measured"].split()[0]) == pytest.approx(2 * 41.1, rel=0.1)
    assert texts["speed-up", "measured"].startswith("1.5") and "(" in texts["speed-up", "measured"]
    assert line(table, "n2m1")["speed-up", "measured"] == "1.00"
    assert line(table, "n8m4")["samples/s", "measured"] == "needs 8 devices"
    slower = line(side_by_side(subject(everything, "unet-speed")), "pipeline-1")
    assert slower["speed-up", "published"] == "0.86", "two digits"
    notes = " ".join(table.notes)
    assert "over that of the first row, n2m1" in notes
    assert "Measured (small, CUDA) did other work than published, with other L." in notes
    assert "shows its rows our n2m1, our n2m4" in notes


def test_kinds_of_memory_are_kept_apart(everything: list[Record]) -> None:
    texts = line(side_by_side(subject(everything, "amoebanet-memory")), "pipeline-2")
    assert ("allocated memory", "published") not in texts
    assert texts["reserved memory", "published"] == "9.46 GiB"
    assert texts["reserved memory", "measured"] == "5.77 GiB" and texts["allocated memory", "measured"] == "2.89 GiB"


def test_the_ablation(everything: list[Record]) -> None:
    texts = line(side_by_side(subject(everything, "unet-ablation")), "dep-str-ptl")
    assert texts["utilization", "published"] == "75%" and texts["speed-up", "published"] == "1.91"
    assert texts["speed-up", "measured"].startswith("1.9") and texts["reserved memory", "measured"] == "12.29 GiB"
