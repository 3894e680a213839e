"""The table of engines: samples per second of each, its times over threads, and why some rows have none."""

from __future__ import annotations

from typing import Any

import pytest

from reproduce.experiments import EXPERIMENTS
from reproduce.records.record import Result
from reproduce.tables.all import tables
from reproduce.tables.engines import GROUP
from reproduce.tables.layout import WIDTH

from .. import made
from ..made import emulated, record


def row(name: str, engine: str, *seconds: float, **changes: Any) -> Result:
    """Make a row that took these seconds by that engine; without any it was not run."""
    config = next(row for row in EXPERIMENTS["amoebanet-speed"].scale("small").rows if row.name == name).config()
    own = {"experiment": "amoebanet-speed", "engine": engine, "config": config}
    return made.row(name, seconds, **{**own, "status": "measured" if seconds else "not run", **changes})


THREADS = row("GPipe n2m4", "threads", 32.0, 16.0, 32.0)
NAIVE = row("naive n2", "threads", 32.0, over="naive n2")
FEW = {"reason": "too few"}
LACKING = row("GPipe n8m4", "ranks", status="needs devices", reason="needs 8 devices")
ALL = [
    NAIVE, THREADS, emulated(row("GPipe n2m4", "threads", 4.0)), row("GPipe n2m4", "ranks", 16.0, 32.0, 8.0),
    row("naive n2", "ranks", **FEW), row("naive n2", "Schedule1F1B", **FEW),
    row("GPipe n2m4", "Schedule1F1B", status="failed", reason="no such luck"), LACKING,
]  # fmt: skip


@pytest.mark.parametrize(
    ("results", "expected", "notes"),
    [
        (ALL, [("row", "threads", "ranks", "over\nthreads", "Schedule\n1F1B"), ("naive n2", "1.00", "-", "", "-"),
               ("GPipe n2m4", "1.00", "2.00", "2.00", "failed")],
         ["ranks, Schedule1F1B: too few (naive n2)", "no such luck", "1 row not run for want of devices"]),
        ([row("GPipe n2m4", "ranks", 16.0)], [("row", "ranks"), ("GPipe n2m4", "2.00")], []),
        ([NAIVE, THREADS], [], []),
        ([LACKING], [], []),
    ],
)  # fmt: skip
def test_engines_stand_beside_each_other(
    results: list[Result], expected: list[tuple[str, ...]], notes: list[str]
) -> None:
    shown = tables(record(*results), group=GROUP)
    assert [line for each in shown for line in (tuple(each.headings), *each.rows)] == expected
    said = "".join(each.text() for each in shown)
    assert [note for note in notes if note not in said] == [] and all(len(line) <= WIDTH for line in said.splitlines())
    alone = tables(record(*(each for each in results if each.engine == "threads")))
    assert [each.rows for each in tables(record(*results)) if each.group != GROUP] == [each.rows for each in alone]
