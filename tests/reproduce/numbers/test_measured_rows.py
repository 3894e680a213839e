"""Rows measured as published: taken from records, the newest run's, with its machine; shown next to predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from reproduce.machine.description import Gpu, Machine
from reproduce.numbers.measured_rows import MeasuredRow, measured_rows
from reproduce.records.places import RESULTS
from reproduce.records.record import Result, load, save
from reproduce.tables.predicted import predicted_tables

from ..made import record, row

GPUS = Machine("Linux", "a CPU", 4, 8, None, [Gpu("a GPU", 2**30)] * 4)


def result(name: str = "n2m1", **changes: Any) -> Result:
    """Make a row as published, of three steps, but for what is changed."""
    link, config = f"tg-amoebanetd-speed/{name}", {"configuration": "as published", "batch_size": 96}
    made = row(name, [1.0, 2.0, 30.0], experiment="amoebanet-speed", scale="paper", published=link, config=config)
    return replace(made, **changes)


OTHERS: list[dict[str, Any]] = [
    {"scale": "small"}, {"experiment": "unet-speed"}, {"status": "failed"}, {"emulated": True, "status": "emulated"},
    {"samples": {}}, {"device": "meta"}, {"published": None},
    {"config": {"configuration": "GPipe", "batch_size": 96}},
]  # fmt: skip


@pytest.mark.parametrize("changes", OTHERS, ids=lambda changes: next(iter(changes)))
def test_only_rows_as_published_count(tmp_path: Path, changes: dict[str, Any]) -> None:
    save(record(result(**changes)), tmp_path / "a.json")
    assert measured_rows("amoebanet-speed", tmp_path) == {}


def test_the_newest_run_counts_whatever_its_file_is_called(tmp_path: Path) -> None:
    new = result(samples={"step_time": [4.0]})
    memory = result("pipeline-2", config={}, samples={}, values={"peak_allocated": [2**30, 2**31]})
    save(record(new, started="2026-01-02T00:00:00Z", machine=GPUS, device="cuda"), tmp_path / "a.json")
    save(record(result(), result("n4m1"), memory, started="2026-01-01T00:00:00Z"), tmp_path / "b.json")
    (tmp_path / "c.json").write_text("{")
    assert measured_rows("amoebanet-speed", tmp_path) == {
        "n2m1": MeasuredRow("2 x a GPU", 24.0),
        "n4m1": MeasuredRow("a CPU", 48.0),
        "pipeline-2": MeasuredRow("a CPU", None, 3 * 2**30),
    }


@pytest.mark.parametrize(
    ("name", "said", "epoch"),
    [("unet-speed", "a median step, on 8 x a GPU: {}", True),
     ("unet-ablation", "a median step, on 8 x a GPU: {}", False),
     ("unet-memory", "measured, allocated: {} 5.0 on 8 x a GPU", False)],
)  # fmt: skip
def test_tables_say_what_was_measured_and_where(name: str, said: str, epoch: bool) -> None:
    predicted = load(RESULTS / "predicted" / f"{name}-p40x8.json")
    last = predicted.results[-1].row
    table, *_ = predicted_tables(predicted, {last: MeasuredRow("8 x a GPU", 123.4, 5 * 2**30)})
    notes = " ".join(table.notes)
    assert said.format(last) in notes and ("an epoch, which ends in a smaller one" in notes) == epoch
    assert name == "unet-memory" or [cells[-1] for cells in table.rows][-2:] == ["not run", "123.4"]
