"""Load the records (files of results) of one side of a comparison.

A side is a record, a folder of records, a JSON file of pytest-benchmark, or a git revision.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from msgspec import Struct

from reproduce.error import Error
from reproduce.machine.description import Machine
from reproduce.machine.git import Git, commit_of, git
from reproduce.records.places import Json, decode, find_record, parse_json, read_json
from reproduce.records.record import (
    SUCCESS,
    Key,
    Record,
    Result,
    Run,
    hardware_name,
    parse,
    ranked,
)
from reproduce.records.times import check_time

UNVERSIONED = ("unversioned", "unknown")
"""What pytest-benchmark writes as the commit if there is no checkout, or if git fails."""
IN_REVISION = "results/measured"  # the default folder of a revision's records
Records = Sequence[Record]


class _Stats(Struct):
    """The times of a benchmark in seconds per call: their median, and sometimes every time.

    pytest-benchmark writes every time (`data`) only with the option --benchmark-save-data.
    """

    median: float
    data: list[float] = []


class _Benchmark(Struct):
    fullname: str
    name: str
    stats: _Stats
    params: dict[str, Json] | None = None


class _File(Struct):
    benchmarks: list[_Benchmark]
    machine_info: dict[str, Json]
    commit_info: dict[str, Json] | None = None
    datetime: str = ""
    version: str | None = None


def from_pytest_benchmark(data: Json, where: str) -> Record:
    """Return a record (results of a run) made from the content of a file of pytest-benchmark.

    The content is parsed JSON. In the record, each test file becomes an experiment, and each test
    becomes a row (a measured configuration) of this experiment.
    """
    file = decode(_File, data, where)
    results = []
    for i, benchmark in enumerate(file.benchmarks):
        stats = benchmark.stats
        place = f"{where}: benchmarks[{i}].stats"
        check_time(benchmark.name, stats.median, f"{place}.median")
        for k, seconds in enumerate(stats.data):
            check_time(benchmark.name, seconds, f"{place}.data[{k}]")
        config = {"benchmark": benchmark.fullname, **(benchmark.params or {})}
        # The name of a method does not have its class, but the full name does: FILE::CLASS::NAME.
        file_name, _, row = benchmark.fullname.partition("::")
        result = Result(
            experiment=file_name,
            row=row or benchmark.name,
            status="measured",
            config=config,
            samples={"time": stats.data or [stats.median]},
        )
        results.append(result)
    name = Path(where).stem
    title = f"benchmarks of {where}"
    return Record(name, title, "measured", {"time": "s"}, results, run=_run_of(file))


def _run_of(file: _File) -> Run:
    commit = file.commit_info or {}
    revision = None
    if commit.get("id") and commit["id"] not in UNVERSIONED:
        revision = Git(commit["id"], bool(commit.get("dirty")))
    python = file.machine_info.get("python_version")
    return Run(
        state="finished",
        command=["pytest", "--benchmark-json"],
        seed=None,
        started=file.datetime,
        ended=None,
        device="cpu",
        devices=1,
        threads_per_device=None,
        machine=_machine_of(file.machine_info),
        versions={"python": python, "pytest-benchmark": file.version},
        git=revision,
        load=None,
    )


def _machine_of(info: dict[str, Json]) -> Machine:
    cpu = info.get("cpu") or {}
    cores = cpu.get("count") or 1
    processor = cpu.get("brand_raw") or info.get("processor") or "unknown"
    system = f"{info.get('system', '')} {info.get('machine', '')}".strip()
    return Machine(system, processor, cores, cores, memory=None)


@dataclass(frozen=True)
class Entry:
    """A row (the results of one configuration), and the record (a file) that contains the row."""

    record: Record
    result: Result

    @property
    def hardware(self) -> str | None:
        """Return the name of the hardware that the row was predicted for.

        Return None if the row was not predicted.
        """
        if self.result.status != "predicted":
            return None
        return hardware_name(self.record, self.result)


@dataclass(frozen=True)
class Side:
    """The rows (configurations) of one side of a comparison.

    A side is, for example, a run or a folder of records. If several records have the same row, the
    row is taken from the best record that has a number for it. The function `ranked` says which
    records are better.

    Attributes:
        letter: The side's short name in tables, such as A.
        name: The name of the side that the user gave, such as a path.
        entries: The rows, each with its record.
        records: All records of the side.
        superseded: The number of rows that were left out, because a better record has the same row.
    """

    letter: str
    name: str
    entries: list[Entry]
    records: list[Record]
    superseded: int = 0


def load_side(letter: str, name: str) -> Side:
    """Load a side of a comparison.

    Args:
        letter: The side's short name in tables, such as A.
        name: A path, the name of a run, or a git revision of the current checkout (REVISION or
            REVISION:PATH).

    Raises:
        Error: There is no such side, or one of its records cannot be read.
    """
    path = find_record(name or "''")
    if path.is_dir():
        files = sorted(path.glob("*.json"))
        if not files:
            raise Error(f"{name}: no record (*.json) in this folder{_subfolders(path)}")
        records = [_read(read_json(file), str(file)) for file in files]
    elif path.exists():
        records = [_read(read_json(path), name)]
    else:
        records = list(_from_git(name))
    return side_of(letter, name, records)


def _subfolders(path: Path) -> str:
    """Return a hint that names up to three folders below `path` that have records.

    The hint is empty if no such folder has records.
    """
    inside = set()
    for file in path.rglob("*.json"):
        folder = file.parent.relative_to(path)
        inside.add(folder.as_posix())
    if not inside:
        return ""
    named = [str(path / folder) for folder in sorted(inside)[:3]]
    return f"; there are some in {', '.join(named)}"


def side_of(letter: str, name: str, records: Records) -> Side:
    """Make a side of a comparison from its records (files of results).

    If several records have the same row (configuration), only one of these rows is kept. The
    docstring of `Side` says which one.
    """
    experiments: dict[str, None] = {}
    count = 0
    for record in records:
        count += len(record.results)
        for result in record.results:
            experiments[result.experiment] = None
    chosen: dict[tuple[Key, str | None], Entry] = {}
    for experiment in experiments:
        for record in ranked(records, experiment):
            for result in record.results:
                if result.experiment != experiment:
                    continue
                key = (result.key, hardware_name(record, result))
                known = chosen.get(key)
                if known is None or (_has_number(result) and not _has_number(known.result)):
                    chosen[key] = Entry(record, result)
    superseded = count - len(chosen)
    return Side(letter, name, list(chosen.values()), list(records), superseded)


def _has_number(result: Result) -> bool:
    return result.status in SUCCESS


def _read(data: Json, where: str) -> Record:
    """Convert the parsed content of a JSON file to a record, the format for results of a run.

    Three kinds of files can be converted: a file that contains a record, a file of counts such as
    benchmarks/gates/counts.json, or a file that pytest-benchmark wrote.
    """
    if isinstance(data, dict):
        if _are_counts(data):
            return _from_counts(data, where)
        if "benchmarks" in data and "machine_info" in data:
            return from_pytest_benchmark(data, where)
    return parse(data, where)


def _are_counts(rows: dict[str, Json]) -> bool:
    """Return whether a file's content is a table of counts: rows whose values are all integers."""
    for counts in rows.values():
        if not isinstance(counts, dict) or set(map(type, counts.values())) != {int}:
            return False
    return bool(rows)


def _from_counts(rows: dict[str, Json], where: str) -> Record:
    unit = {}
    results = []
    for row, counts in rows.items():
        unit.update(dict.fromkeys(counts, "count"))
        results.append(Result("counts", row, "measured", config={"of": row}, values=counts))
    name = PurePosixPath(where).stem
    return Record(name, f"counts of {where}", "measured", unit, results)


def _from_git(name: str) -> Iterator[Record]:
    """Yield the records (files of results) that a git revision has at a path.

    Args:
        name: REVISION or REVISION:PATH. PATH is a folder of records, or one record.
    """
    here = Path()
    revision, _, place = name.partition(":")
    place = place or IN_REVISION
    folder = PurePosixPath(place)
    try:
        commit = commit_of(here, revision)
    except Error:
        raise Error(
            f"{name}: no such file or folder, and no git revision here; name a record, a folder "
            "or a revision"
        ) from None
    listing = ("ls-tree", "-r", "-z", "--full-tree", "--name-only")
    listed = git(here, *listing, commit, "--", place).decode()
    files = []
    for file in listed.split("\0"):
        # Subfolders do not count, like in a folder on disk.
        path = PurePosixPath(file)
        if file.endswith(".json") and folder in (path, path.parent):
            files.append(file)
    if not files:
        raise Error(
            f"{name}: this git revision has no record (*.json) in {place}; name another folder as "
            f"{revision}:FOLDER"
        )
    for file in files:
        where = f"{revision}:{file}"
        content = git(here, "cat-file", "blob", f"{commit}:{file}")
        yield _read(parse_json(content, where), where)
