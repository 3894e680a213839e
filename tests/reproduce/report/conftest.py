from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from reproduce.experiments import EXPERIMENTS, Row
from reproduce.machine.description import Gpu, Machine
from reproduce.machine.git import Git
from reproduce.records.record import Record, Run, load
from reproduce.report.page import page

from ..made import STEADY, ran

RESULTS = Path(__file__).resolve().parents[3] / "results"
TABLES = {experiment.name: experiment.table for experiment in EXPERIMENTS.values() if experiment.table}
GPU = Gpu("a GPU", 16 << 30, 1500.0, 5000.0, 250.0, "PCIe 3.0 x16")
RUN = Run("finished", ["python", "-m", "reproduce"], 0, "2020-04-21T10:02:05Z", "2020-04-21T10:12:05Z", "cuda", 2, None,
          Machine("Linux", "a CPU", 4, 8, 8 << 30, [GPU] * 2), {"torch": "2.11.0", "driver": "575.57"},
          Git("0123456789abcdef", dirty=True), [0.5, 0.25, 1.0])  # fmt: skip


@pytest.fixture(scope="session")
def paper() -> list[Record]:
    """Give the published tables."""
    records = map(load, sorted((RESULTS / "paper").glob("*.json")))
    return [record for record in records if record.kind == "published"]


def measured_from(table: Record, experiment: str) -> Record:
    """Pretend that a published table's rows were run, on at most four devices, at other speeds and another size."""
    speeds = {each.row: each.values.get("throughput") for each in table.results}

    def steps(row: Row, times: float = 2) -> list[float] | str | None:
        if row.published is None or row.devices > 4:
            return row.published and "needs devices"
        speed, turn = speeds[row.published], ((row.chunks or 0) + len(row.name)) % len(STEADY)
        return [times * speed / each for each in (*STEADY[turn:], *STEADY[:turn])] if speed else []

    own: dict[str, Any] = {
        "model_bytes": 1 << 30,
        "parameters": 1 << 27,
        "peak_allocated": lambda row: [1.5e9 + 1e8 * device for device in range(row.devices)],
        "peak_reserved": lambda row: [3e9 + 2e8 * device for device in range(row.devices)],
    }
    run = ran(experiment, "paper", steps, "cuda", **own)
    faster = [each for each in ran(experiment, "paper", lambda row: steps(row, 6), "cuda", emulated=True, **own)
              if each.samples]  # fmt: skip
    results = [replace(each, row=f"our {each.row}", scale="small", config={**each.config, "L": 3})
               for each in (*run, *faster)]  # fmt: skip
    return Record(f"{experiment}-run", f"{experiment}, run", "measured", {}, results, scale="small", run=RUN)


def predicted_from(table: Record, experiment: str) -> Record:
    """Pretend that a published table's rows were predicted."""
    results = [
        replace(each, experiment=experiment, status="predicted", published=f"{table.name}/{each.row}",
                values={"throughput": each.values["throughput"] * 1.1})
        for each in table.results
    ]  # fmt: skip
    return Record(f"{experiment}-p", f"{experiment}, predicted", "predicted", {}, results, hardware={"name": "a<b"})


@pytest.fixture(scope="session")
def everything(paper: list[Record]) -> list[Record]:
    """Give records of every experiment: published, measured here in a pretence, and predicted where it is speed."""
    by_name = {record.name: record for record in paper}
    records = list(paper)
    for experiment, name in TABLES.items():
        table = by_name[name]
        records.append(measured_from(table, experiment))
        if all("throughput" in row.values and row.values["throughput"] for row in table.results):
            records.append(predicted_from(table, experiment))
    return records


@pytest.fixture(scope="session")
def text(everything: list[Record]) -> str:
    """Give the page of everything."""
    return page(everything)
