"""SideBySide: what sources say of a published row stands on its line, each number under its own source."""

from __future__ import annotations

import pytest

from reproduce.records.record import Record
from reproduce.report.side_by_side import SideBySide, side_by_side
from reproduce.report.subjects import find_subjects


def table(records: list[Record], experiment: str) -> SideBySide:
    (subject,) = (each for each in find_subjects(records) if each.name == experiment)
    return side_by_side(subject)


def cells(found: SideBySide, row: str) -> dict[tuple[str, str], str]:
    (line,) = (line for line in found.rows if line[0] == row)
    names = [(column.heading, column.source.kind if column.source else "") for column in found.columns]
    return dict(zip(names, line, strict=True))


def test_speed(everything: list[Record]) -> None:
    found = table(everything, "amoebanet-speed")
    assert len(found.rows) == 9
    line = cells(found, "n2m4")
    assert (line["n", ""], line["m", ""], line["batch", ""]) == ("2", "4", "256")
    assert line["samples/s", "published"] == "41.1" and line["speed-up", "published"] == "1.54"
    assert line["samples/s", "predicted"] == "45.2" and line["speed-up", "predicted"] == "1.54"
    measured = line["samples/s", "measured"].split()[0]
    assert float(measured) == pytest.approx(2 * 41.1, rel=0.1)
    assert line["speed-up", "measured"].startswith("1.5") and "(" in line["speed-up", "measured"]
    assert cells(found, "n2m1")["speed-up", "measured"] == "1.00"
    assert cells(found, "n8m4")["samples/s", "measured"] == "needs 8 devices"


def test_notes_say_what_differs(everything: list[Record]) -> None:
    notes = " ".join(table(everything, "amoebanet-speed").notes)
    assert "over that of the first row, n2m1" in notes
    assert "Measured (small, CUDA) did other work than published, with other L." in notes
    assert "shows its rows our n2m1, our n2m4" in notes


def test_kinds_of_memory_are_kept_apart(everything: list[Record]) -> None:
    line = cells(table(everything, "amoebanet-memory"), "pipeline-2")
    assert ("allocated memory", "published") not in line
    assert line["reserved memory", "published"] == "9.46 GiB"
    assert line["reserved memory", "measured"] == "5.77 GiB" and line["allocated memory", "measured"] == "2.89 GiB"


def test_the_ablation(everything: list[Record]) -> None:
    line = cells(table(everything, "unet-ablation"), "dep-str-ptl")
    assert line["utilization", "published"] == "75%" and line["speed-up", "published"] == "1.91"
    assert line["speed-up", "measured"].startswith("1.9") and line["reserved memory", "measured"] == "12.29 GiB"
