"""What a pipeline must get right, and which pipelines do.

    python -m benchmarks.conformance --json results/benchmarks/conformance.json

Each row of tests/behaviours/rows/training trains or evaluates a small pipeline on CPUs with each engine, and is
compared with the plain layers. Two engines need a separate folder of packages:

    pip install --no-deps --target FOLDER torchgpipe==0.0.7     # and then --older FOLDER
    pip install --target FOLDER deepspeed                       # and then --deepspeed FOLDER, unless it is installed
"""

import importlib.util
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import get_args

from msgspec.structs import replace

from benchmarks.harness import Found, by_case, cell, collect, command, start
from benchmarks.others.processes import PRELOADED, Adapter, Kind, run
from reproduce.records.record import Record, Result
from reproduce.tables.layout import grid
from tests.behaviours.rows.training import ROWS

ENGINES: dict[str, Adapter] = {
    "threads": Adapter("benchmarks.others.ours", "Threads"),
    "ranks": Adapter("benchmarks.others.ours", "Ranks", ranks=True),
    "0.0.7": Adapter("benchmarks.others.older", "Older"),
    "ScheduleGPipe": Adapter("benchmarks.others.pipelining", "TorchGPipe", ranks=True),
    "Schedule1F1B": Adapter("benchmarks.others.pipelining", "Torch1F1B", ranks=True),
    "DeepSpeed": Adapter("benchmarks.others.deep_speed", "DeepSpeed", ranks=True),
}
PACKAGES = {
    "0.0.7": "torchgpipe",
    "ScheduleGPipe": "torch",
    "Schedule1F1B": "torch",
    "DeepSpeed": "deepspeed",
}
KINDS: tuple[Kind, ...] = get_args(Kind)
CHECKS = {row.name: row for row in ROWS}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run checks with engines, record the results, and print a table."""
    parser = command("conformance", __doc__ or "")
    parser.add_argument("check", nargs="*", metavar="CHECK", help="these checks only, by name")
    parser.add_argument(
        "--engine", nargs="+", choices=ENGINES, default=[*ENGINES], help="these engines only"
    )
    parser.add_argument("--older", type=Path, metavar="FOLDER", help="where torchgpipe 0.0.7 is")
    parser.add_argument(
        "--deepspeed",
        type=Path,
        metavar="FOLDER",
        help="where DeepSpeed is, if it is not installed",
    )
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.check if name not in CHECKS]:
        parser.error(f"there is no check {unknown[0]!r}; the checks are {', '.join(CHECKS)}")
    engines = {name: ENGINES[name] for name in options.engine}
    sys.path += [str(options.deepspeed)] if options.deepspeed else []
    there = {
        "0.0.7": options.older is not None,
        "DeepSpeed": importlib.util.find_spec("deepspeed") is not None,
    }
    for name in [name for name in engines if not there.get(name, True)]:
        print(f"{name} is left out: it is not installed, see --help", file=sys.stderr)
        del engines[name]
    if "0.0.7" in engines:
        engines["0.0.7"] = engines["0.0.7"]._replace(folder=str(options.older.absolute()))
    PRELOADED.extend(["deepspeed.pipe"] * ("DeepSpeed" in engines))
    options.engine = [*engines]
    checks = options.check or [*CHECKS]
    record = start(options, "conformance", "what pipelines get right", {}, devices=2)
    paths = {
        PACKAGES[name]: [each.folder] if each.folder else sys.path
        for name, each in engines.items()
        if name in PACKAGES
    }
    software = {
        name: next(found.version for found in distributions(name=name, path=path))
        for name, path in paths.items()
    }
    record = replace(record, software=software)
    collect(record, options.json, check(checks, engines), len(checks), table)


def check(checks: Sequence[str], engines: dict[str, Adapter]) -> Found:
    """Yield the results of each check, one for each engine."""
    for name in checks:
        results = []
        for engine, adapter in engines.items():
            kind, said = run(CHECKS[name], adapter)
            results.append(
                Result(name, engine, "measured", values={"outcome": kind}, reason=said or None)
            )
        yield results


def table(record: Record, style: str = "simple", first: Sequence[list[str]] = ()) -> str:
    """Render a count of results per engine, and a table of all checks: what works here, and elsewhere.

    The lines `first` come before those of the record.
    """
    cases = by_case(record)
    engines = list(dict.fromkeys(result.row for result in record.results))
    summary = []
    for engine in engines:
        counts = Counter(
            str(cases[name][engine].values["outcome"]) for name in cases if engine in cases[name]
        )
        package = PACKAGES.get(engine)
        of = "this library" if package is None else f"{package} {(record.software or {})[package]}"
        summary.append([engine, of, *(str(counts[kind] or "") for kind in KINDS)])
    rows = [*first]
    group = ""
    for name, ends in cases.items():
        check = CHECKS[name]
        if check.group != group:
            group = check.group
            rows.append([f"**{group}**", "", "", ""])
        here, there = (
            [ends[e] for e in engines if e in ends and (e in PACKAGES) == other]
            for other in (False, True)
        )
        rows.append([name, ended(here), check.why, ended(there)])
    heads = ["", "here", "why it matters, or what to know", "elsewhere"]
    return "\n\n".join(
        [grid(["engine", "version", *KINDS], summary, style), grid(heads, rows, style)]
    )


def ended(results: Sequence[Result]) -> str:
    """Summarize the results of a check. Engines that are not named are equal."""
    said: dict[tuple[str, str], list[str]] = {}
    for result in results:
        if (kind := str(result.values["outcome"])) != "equal":
            said.setdefault((kind, cell(result.reason)), []).append(result.row)
    ends = [f"{kind} ({', '.join(who)}): {what}" for (kind, what), who in said.items()]
    return "; ".join(ends) or ("right" if results else "")


if __name__ == "__main__":
    main()
