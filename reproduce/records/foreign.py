"""Read the JSON that pytest-benchmark writes (`--benchmark-json`, `--benchmark-save`) as a record."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from reproduce.machine.description import Machine
from reproduce.machine.git import Git
from reproduce.records.decode import Json, decode
from reproduce.records.record import Record, Result, Run


class _Stats(Struct):
    median: float  # seconds per call
    data: list[float] = []  # each sample, if the file was saved with --benchmark-save-data


class _Benchmark(Struct):
    fullname: str
    name: str
    stats: _Stats
    params: dict[str, Json] | None = None


class _File(Struct):
    benchmarks: list[_Benchmark]
    machine_info: dict[str, Json]
    commit_info: dict[str, Json] | None = None  # without an id outside a checkout
    datetime: str = ""
    version: str | None = None


def is_pytest_benchmark(data: Json) -> bool:
    """Say whether a parsed file is one of pytest-benchmark's."""
    return isinstance(data, dict) and "benchmarks" in data and "machine_info" in data


def from_pytest_benchmark(data: Json, where: str) -> Record:
    """Turn the parsed file called `where` into a record: an experiment for each test file, a row for each test.

    Raises:
        Error: the file is not what pytest-benchmark writes.
    """
    file = decode(_File, data, where)
    info, commit = file.machine_info, file.commit_info or {}
    cpu = info.get("cpu") or {}
    cores = cpu.get("count") or 1
    run = Run(
        state="finished",
        command=["pytest", "--benchmark-json"],
        seed=None,
        started=file.datetime,
        ended=None,
        device="cpu",
        devices=1,
        threads_per_device=None,
        machine=Machine(
            system=f"{info.get('system', '')} {info.get('machine', '')}".strip(),
            cpu=cpu.get("brand_raw") or info.get("processor") or "unknown",
            cores=cores,
            cores_installed=cores,
            memory=None,
        ),
        versions={"python": info.get("python_version"), "pytest-benchmark": file.version},
        git=Git(commit["id"], bool(commit.get("dirty"))) if commit.get("id") else None,
        load=None,
    )
    results = [
        Result(
            experiment=benchmark.fullname.partition("::")[0],
            row=benchmark.name,
            status="measured",
            config={"benchmark": benchmark.fullname, **(benchmark.params or {})},
            samples={"time": benchmark.stats.data or [benchmark.stats.median]},
        )
        for benchmark in file.benchmarks
    ]
    return Record(Path(where).stem, f"benchmarks of {where}", "measured", {"time": "s"}, results, run=run)
