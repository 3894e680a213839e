"""Rows measured as published: found in records, the newest run's, with its machine; shown beside predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from reproduce.machine.description import Gpu, Machine
from reproduce.numbers.measured_rows import MeasuredRow, measured_rows
from reproduce.records.record import Record, Result, Run, load, save
from reproduce.tables.predicted import predicted_tables

PREDICTED = Path(__file__).resolve().parents[3] / "results" / "predicted"
CPU = Machine("Linux", "a CPU", 4, 8, None)
GPUS = replace(CPU, gpus=[Gpu("a GPU", 2**30)] * 4)


def record(started: str, *results: Result, machine: Machine = CPU) -> Record:
    device = "cuda" if machine.gpus else "cpu"
    run = Run("finished", [], 0, started, None, device, 2, None, machine, {}, None, None)
    return Record("name", "Title", "measured", {}, list(results), scale="paper", run=run)


def result(row: str = "n2m1", *, table: str = "tg-amoebanetd-speed", **changes: Any) -> Result:
    config = {"configuration": "as published", "batch_size": 96}
    times = {"step_time": [1.0, 2.0, 30.0]}
    made = Result("amoebanet-speed", row, "measured", "paper", "cpu", config, published=f"{table}/{row}", samples=times)
    return replace(made, **changes)


LOOSE = [
    {"scale": "small"},
    {"experiment": "unet-speed"},
    {"status": "failed"},
    {"samples": {}},
    {"device": "meta"},
    {"published": None},
    {"config": {"configuration": "GPipe", "batch_size": 96}},
]


@pytest.mark.parametrize("changes", LOOSE, ids=lambda changes: next(iter(changes)))
def test_only_rows_as_published_count(tmp_path: Path, changes: dict[str, Any]) -> None:
    save(record("2026-01-01T00:00:00Z", result(**changes)), tmp_path / "a.json")
    assert measured_rows("amoebanet-speed", tmp_path) == {}


def test_the_newest_run_counts_whatever_its_file_is_called(tmp_path: Path) -> None:
    old, new = result(), result(samples={"step_time": [4.0]})
    save(record("2026-01-02T00:00:00Z", new, machine=GPUS), tmp_path / "a.json")
    save(record("2026-01-01T00:00:00Z", old, result("n4m1")), tmp_path / "b.json")
    (tmp_path / "c.json").write_text("{")
    assert measured_rows("amoebanet-speed", tmp_path) == {
        "n2m1": MeasuredRow("2 x a GPU", 24.0),
        "n4m1": MeasuredRow("a CPU", 48.0),
    }


def test_memory_is_what_all_devices_hold(tmp_path: Path) -> None:
    config = {"configuration": "pipeline", "batch_size": 32}
    peaks = result("pipeline-2", config=config, samples={}, values={"peak_allocated": [2**30, 2**31]})
    save(record("2026-01-01T00:00:00Z", peaks), tmp_path / "a.json")
    assert measured_rows("amoebanet-speed", tmp_path) == {"pipeline-2": MeasuredRow("a CPU", None, 3 * 2**30)}


@pytest.mark.parametrize("name", sorted(path.stem for path in PREDICTED.glob("*.json")))
@pytest.mark.parametrize("some", [True, False])
def test_tables_say_what_was_measured_and_where(name: str, some: bool) -> None:
    kept = load(PREDICTED / f"{name}.json")
    row = kept.results[-1].row
    for table in predicted_tables(kept, {row: MeasuredRow("8 x a GPU", 123.4, 5 * 2**30)} if some else {}):
        notes = " ".join(table.notes)
        assert max(map(len, table.text().splitlines())) <= 80
        assert ("8 x a GPU" in notes) == some
        assert ("not measured: no row of it was run at paper scale" in notes) != some
        if table.headings[-1] == "measured":
            assert [cells[-1] for cells in table.rows] == ["not run"] * (len(table.rows) - 1) + [
                "123.4" if some else "not run"
            ]
            epochs = any("last_batch_size" in result.config for result in kept.results)
            assert ("an epoch, which ends in a smaller one" in notes) == (some and epochs)
        elif some:
            assert f"measured, allocated: {row} 5.0 on 8 x a GPU" in notes


def test_rows_without_a_memory_model_say_so() -> None:
    _, memory = predicted_tables(load(PREDICTED / "unet-ablation-p40x8.json"), {})
    assert [(row[0], row[2]) for row in memory.rows[:3]] == [
        ("baseline", "not run"), ("dep-x-x", "left out"), ("dep-str-x", "left out"),
    ]  # fmt: skip
    assert any(note.startswith("dep-x-x, dep-str-x: without portals") for note in memory.notes)
