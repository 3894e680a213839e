"""Load one side of a comparison from a record, a folder of records, pytest-benchmark's JSON or a git revision."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from msgspec import Struct

from reproduce.error import Error
from reproduce.machine.description import Machine
from reproduce.machine.git import Git, commit_of, git
from reproduce.records.places import Json, decode, find_record, parse_json, read_json
from reproduce.records.record import SUCCESS, Record, Result, Run, hardware_name, parse, ranked

IN_REVISION = "results/measured"  # the default folder of a revision's records


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
    commit_info: dict[str, Json] | None = None  # has no "id" if it was not run in a checkout
    datetime: str = ""
    version: str | None = None


def from_pytest_benchmark(data: Json, where: str) -> Record:
    """Turn a file that pytest-benchmark wrote into a record: an experiment for each test file, a row for each test."""
    file = decode(_File, data, where)
    info, commit = file.machine_info, file.commit_info or {}
    cpu = info.get("cpu") or {}
    cores = cpu.get("count") or 1
    system = f"{info.get('system', '')} {info.get('machine', '')}".strip()
    machine = Machine(
        system,
        cpu.get("brand_raw") or info.get("processor") or "unknown",
        cores,
        cores,
        memory=None,
    )
    run = Run(
        state="finished",
        command=["pytest", "--benchmark-json"],
        seed=None,
        started=file.datetime,
        ended=None,
        device="cpu",
        devices=1,
        threads_per_device=None,
        machine=machine,
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
    return Record(
        Path(where).stem, f"benchmarks of {where}", "measured", {"time": "s"}, results, run=run
    )


@dataclass(frozen=True)
class Entry:
    """Hold a row and the record that it comes from."""

    record: Record
    result: Result

    @property
    def hardware(self) -> str | None:
        """Give the name of the hardware description that a prediction was made with."""
        return (
            hardware_name(self.record, self.result) if self.result.status == "predicted" else None
        )


@dataclass(frozen=True)
class Side:
    """Hold the rows of a side. If several runs have a row, the first of `ranked` that has a number for it counts.

    `letter` is its short name in tables, `name` what the user called it.
    """

    letter: str
    name: str
    entries: list[Entry]
    records: list[Record]
    superseded: int = 0


def load_side(letter: str, name: str) -> Side:
    """Load a side, or raise `Error`. It is a path, a run's name, or REVISION or REVISION:PATH of the checkout here."""
    path = find_record(name or "''")
    if path.is_dir():
        files = sorted(path.glob("*.json"))
        if not files:
            inside = sorted(
                {file.parent.relative_to(path).as_posix() for file in path.rglob("*.json")}
            )
            advice = (
                f"; there are some in {', '.join(f'{path / folder}' for folder in inside[:3])}"
                if inside
                else ""
            )
            raise Error(f"{name}: no record (*.json) in this folder{advice}")
        return side_of(letter, name, [_read(read_json(file), str(file)) for file in files])
    if path.exists():
        return side_of(letter, name, [_read(read_json(path), name)])
    return side_of(letter, name, list(_from_git(name)))


def side_of(letter: str, name: str, records: Sequence[Record]) -> Side:
    """Make a side from records."""
    chosen: dict[tuple[str | bool | None, ...], Entry] = {}
    for experiment in dict.fromkeys(
        result.experiment for record in records for result in record.results
    ):
        for record in ranked(records, experiment):
            for result in (each for each in record.results if each.experiment == experiment):
                key = (*result.key, hardware_name(record, result))
                if key not in chosen or (
                    chosen[key].result.status not in SUCCESS and result.status in SUCCESS
                ):
                    chosen[key] = Entry(record, result)
    count = sum(len(record.results) for record in records)
    return Side(letter, name, list(chosen.values()), list(records), count - len(chosen))


def _read(data: Json, where: str) -> Record:
    rows = data if isinstance(data, dict) else {}
    if rows and all(
        isinstance(counts, dict) and {*map(type, counts.values())} == {int}
        for counts in rows.values()
    ):
        unit = {what: "count" for counts in rows.values() for what in counts}
        results = [
            Result("counts", row, "measured", config={"of": row}, values=rows[row]) for row in rows
        ]
        return Record(PurePosixPath(where).stem, f"counts of {where}", "measured", unit, results)
    of_pytest = isinstance(data, dict) and "benchmarks" in data and "machine_info" in data
    return from_pytest_benchmark(data, where) if of_pytest else parse(data, where)


def _from_git(name: str) -> Iterator[Record]:
    revision, _, place = name.partition(":")
    here, place = Path(), place or IN_REVISION
    try:
        commit = commit_of(here, revision)
    except Error:
        raise Error(
            f"{name}: no such file or folder, and no git revision here; name a record, a folder or a revision"
        ) from None
    listed = git(
        here, "ls-tree", "-r", "-z", "--full-tree", "--name-only", commit, "--", place
    ).decode()
    files = [file for file in listed.split("\0") if file.endswith(".json")]
    if PurePosixPath(place) not in map(
        PurePosixPath, files
    ):  # a folder: as on disk, without its subfolders
        files = [file for file in files if PurePosixPath(file).parent == PurePosixPath(place)]
    if not files:
        raise Error(
            f"{name}: that revision holds no record (*.json) in {place}; name a place as {revision}:FOLDER"
        )
    for file in files:
        where = f"{revision}:{file}"
        yield _read(parse_json(git(here, "cat-file", "blob", f"{commit}:{file}"), where), where)
