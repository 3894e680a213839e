"""Read the JSON that pytest-benchmark writes (`--benchmark-json`, `--benchmark-save`) as a record."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from reproduce.error import Error
from reproduce.records.decode import DecodeError, Json, decode
from reproduce.records.record import Git, Machine, Record, Result, Run

__all__ = ["from_pytest_benchmark", "is_pytest_benchmark"]

T = TypeVar("T")


@dataclass(frozen=True)
class Stats:
    """Hold seconds per call. `data` is there only if it was saved with --benchmark-save-data."""

    median: float
    data: list[float] = field(default_factory=list)


def is_pytest_benchmark(data: Json) -> bool:
    """Say whether a parsed file is one of pytest-benchmark's."""
    return isinstance(data, dict) and "benchmarks" in data and "machine_info" in data


def from_pytest_benchmark(data: Json, where: str) -> Record:
    """Turn the parsed file called `where` into a record: an experiment for each test file, a row for each test.

    Raises:
        Error: the file is not what pytest-benchmark writes.
    """
    try:
        benchmarks = decode(list[dict[str, Json]], data["benchmarks"], "benchmarks")
        results = [_result(benchmark, f"benchmarks[{i}]") for i, benchmark in enumerate(benchmarks)]
        run = _run(data)
    except DecodeError as error:
        raise Error(f"{where}: {error}") from error
    return Record(Path(where).stem, f"benchmarks of {where}", "measured", {"time": "s"}, results, run=run)


def _result(benchmark: dict[str, Json], where: str) -> Result:
    fullname = _get(str, benchmark, "fullname", where)
    params = _get(dict[str, Json] | None, benchmark, "params", where) or {}  # type: ignore[arg-type]
    stats = _known(Stats, _get(dict[str, Json], benchmark, "stats", where), f"{where}.stats")
    config = {"benchmark": fullname, **params}
    result = Result(fullname.partition("::")[0], _get(str, benchmark, "name", where), "measured", config=config)
    if stats.data:
        return dataclasses.replace(result, samples={"time": stats.data})
    return dataclasses.replace(result, samples={"time": [stats.median]})


def _run(data: dict[str, Json]) -> Run:
    info = decode(dict[str, Json], data["machine_info"], "machine_info")
    cpu = decode(dict[str, Json], info.get("cpu", {}), "machine_info.cpu")
    commit = data.get("commit_info") or {}
    cores = _get(int | None, cpu, "count", "machine_info.cpu") or 1  # type: ignore[arg-type]
    return Run(
        state="finished",
        command=["pytest", "--benchmark-json"],
        seed=None,
        started=str(data.get("datetime", "")),
        ended=None,
        device="cpu",
        devices=1,
        threads_per_device=None,
        machine=Machine(
            system=f"{info.get('system', '')} {info.get('machine', '')}".strip(),
            cpu=str(cpu.get("brand_raw") or info.get("processor") or "unknown"),
            cores=cores,
            cores_installed=cores,
            memory=None,
        ),
        versions={"python": info.get("python_version"), "pytest-benchmark": data.get("version")},
        git=Git(str(commit["id"]), bool(commit.get("dirty"))) if commit.get("id") else None,
        load=None,
    )


def _get(kind: type[T], value: dict[str, Json], name: str, where: str) -> T:
    return decode(kind, value.get(name), f"{where}.{name}")


def _known(kind: type[T], value: dict[str, Json], where: str) -> T:
    """Decode a dataclass from an object that has more fields than it."""
    names = {known.name for known in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return decode(kind, {name: item for name, item in value.items() if name in names}, where)
