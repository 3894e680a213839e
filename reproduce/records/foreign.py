"""Read the JSON that pytest-benchmark writes (`--benchmark-json`, `--benchmark-save`) as a record."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from reproduce.machine.description import Machine
from reproduce.machine.git import Git
from reproduce.records.decode import Json, decode
from reproduce.records.record import Record, Result, Run

__all__ = ["from_pytest_benchmark", "is_pytest_benchmark"]


class Stats(Struct):
    """Hold seconds per call. `data` is there only if it was saved with --benchmark-save-data."""

    median: float
    data: list[float] = []


class Benchmark(Struct):
    """Hold one test."""

    fullname: str
    name: str
    stats: Stats
    params: dict[str, Json] | None = None


class Cpu(Struct, frozen=True):
    """Hold the processor's name and its number of cores."""

    brand_raw: str | None = None
    count: int | None = None


class MachineInfo(Struct):
    """Hold what the machine consists of."""

    system: str = ""
    machine: str = ""
    processor: str | None = None
    python_version: str | None = None
    cpu: Cpu = Cpu()


class CommitInfo(Struct):
    """Hold the revision, None outside a checkout."""

    id: str | None = None
    dirty: bool | None = None


class File(Struct):
    """Hold what is read of a file."""

    benchmarks: list[Benchmark]
    machine_info: MachineInfo
    commit_info: CommitInfo | None = None
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
    file = decode(File, data, where)
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
    return Record(Path(where).stem, f"benchmarks of {where}", "measured", {"time": "s"}, results, run=_run(file))


def _run(file: File) -> Run:
    info, commit = file.machine_info, file.commit_info or CommitInfo()
    cores = info.cpu.count or 1
    return Run(
        state="finished",
        command=["pytest", "--benchmark-json"],
        seed=None,
        started=file.datetime,
        ended=None,
        device="cpu",
        devices=1,
        threads_per_device=None,
        machine=Machine(
            system=f"{info.system} {info.machine}".strip(),
            cpu=info.cpu.brand_raw or info.processor or "unknown",
            cores=cores,
            cores_installed=cores,
            memory=None,
        ),
        versions={"python": info.python_version, "pytest-benchmark": file.version},
        git=Git(commit.id, bool(commit.dirty)) if commit.id else None,
        load=None,
    )
