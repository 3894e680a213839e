from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from reproduce.experiments import EXPERIMENTS
from reproduce.machine.description import Gpu, Machine
from reproduce.machine.git import Git
from reproduce.records.record import Record, Result, Run
from reproduce.report.page import page
from reproduce.report.subjects import load_folders

from ..made import STEADY, emulated, row

RESULTS = Path(__file__).resolve().parents[3] / "results"
TABLES = {experiment.name: experiment.table for experiment in EXPERIMENTS.values() if experiment.table}
GPU = Gpu("a GPU", 16 << 30, 1500.0, 5000.0, 250.0, "PCIe 3.0 x16")
RUN = Run("finished", ["python", "-m", "reproduce"], 0, "2020-04-21T10:02:05Z", "2020-04-21T10:12:05Z", "cuda", 2, None,
          Machine("Linux", "a CPU", 4, 8, 8 << 30, [GPU] * 2), {"torch": "2.11.0", "driver": "575.57"},
          Git("0123456789abcdef", dirty=True), [0.5, 0.25, 1.0])  # fmt: skip


@pytest.fixture(scope="session")
def paper() -> list[Record]:
    """Give the published tables."""
    return [record for record in load_folders(RESULTS / "paper") if record.kind == "published"]


def measured_from(table: Record, experiment: str) -> Record:
    """Pretend that a published table's rows were run, on at most four devices, at another speed and scale."""
    ours = {row.published: row.config() for row in EXPERIMENTS[experiment].scale("paper").rows}
    results = []
    for k, each in enumerate(table.results):
        config = {**each.config, **ours.get(each.row, {}), "configuration": "as published", "L": 3}
        own: dict[str, Any] = {
            "experiment": experiment,
            "device": "cuda",
            "config": config,
            "published": f"{table.name}/{each.row}",
        }
        devices = each.config.get("partitions") or 1
        if devices > 4:
            results.append(row(f"our {each.row}", **own, status="needs devices", reason=f"needs {devices} devices"))
            continue
        speed, turned = each.values.get("throughput"), (*STEADY[k % 8 :], *STEADY[: k % 8])
        steps = [each.config["batch_size"] / speed / 2 * step for step in turned] if speed else None
        peaks = [1.5e9 + 1e8 * device for device in range(devices)]
        memory = {"peak_allocated": peaks, "peak_reserved": [2 * peak for peak in peaks]}
        results.append(
            row(f"our {each.row}", steps, **own, values={"model_bytes": 1 << 30, "parameters": 1 << 27, **memory})
        )
    timed = [emulated(each) for each in results if each.samples]
    results += [replace(each, samples={"step_time": [x / 3 for x in each.samples["step_time"]]}) for each in timed]
    return Record(f"{experiment}-run", f"{experiment}, run", "measured", {}, results, scale="small", run=RUN)


def predicted_from(table: Record, experiment: str) -> Record:
    """Pretend that a published table's rows were predicted."""
    results = []
    for each in table.results:
        own: dict[str, Any] = {"config": each.config, "hardware": "a<b", "published": f"{table.name}/{each.row}"}
        values = {"throughput": each.values["throughput"] * 1.1}
        results.append(Result(experiment, each.row, "predicted", "paper", "meta", **own, values=values))
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
