"""The table of engines: samples per second of each, its times over threads, and why some rows have none."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from reproduce.experiments import EXPERIMENTS
from reproduce.records.record import Record, Result
from reproduce.tables.all import tables
from reproduce.tables.engines import GROUP
from reproduce.tables.layout import WIDTH

from ..made import emulated, record

ROWS = {row.name: row for row in EXPERIMENTS["amoebanet-speed"].scale("small").rows}


def row(name: str, engine: Any, *seconds: float, **changes: Any) -> Result:
    steps = {"step_time": list(seconds), "round": [*range(len(seconds))]} if seconds else {}
    status = "measured" if seconds else "not run"
    config = ROWS[name].config()
    made = Result("amoebanet-speed", name, status, "small", "cpu", config, engine=engine, samples=steps)  # type: ignore[arg-type]
    return replace(made, **changes)


THREADS = row("GPipe n2m4", "threads", 32.0, 16.0, 32.0)
NAIVE = row("naive n2", "threads", 32.0, over="naive n2")
FEW = {"reason": "too few"}


def test_engines_stand_beside_each_other() -> None:
    ran = record(
        NAIVE, THREADS, emulated(THREADS), row("GPipe n2m4", "ranks", 16.0, 32.0, 8.0),
        row("naive n2", "ranks", **FEW), row("naive n2", "Schedule1F1B", **FEW),
        row("GPipe n2m4", "Schedule1F1B", status="failed", reason="no such luck"),
        row("GPipe n8m4", "ranks", status="needs devices", reason="needs 8 devices"),
    )  # fmt: skip
    (table,) = tables(ran, "amoebanet-speed", GROUP)
    assert table.headings == ["row", "threads", "ranks", "over\nthreads", "Schedule\n1F1B"]
    assert table.rows == [("naive n2", "1.00", "-", "", "-"), ("GPipe n2m4", "1.00", "2.00", "2.00", "failed")]
    said = table.text()
    assert max(map(len, said.splitlines())) <= WIDTH
    assert "ranks, Schedule1F1B: too few (naive n2)" in said and "no such luck" in said
    assert "1 row not run for want of devices" in said


def test_other_tables_are_of_threads_alone() -> None:
    alone = record(NAIVE, THREADS)
    both = record(NAIVE, THREADS, row("GPipe n2m4", "ranks", 1.0))
    assert [each.rows for each in tables(alone)] == [each.rows for each in tables(both)][:-1]
    assert not [each for each in tables(alone) if each.group == GROUP]


def test_rows_without_devices_have_no_table() -> None:
    assert not tables(record(row("GPipe n8m4", "ranks", status="needs devices", reason="needs 8 devices")))


def test_ranks_alone_have_a_table_of_their_own() -> None:
    made: Record = record(row("GPipe n2m4", "ranks", 16.0))
    assert [(each.group, each.rows) for each in tables(made)] == [(GROUP, [("GPipe n2m4", "2.00")])]
