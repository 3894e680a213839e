"""Check which pipeline libraries do correctly what training needs.

    python -m benchmarks.conformance --out results/benchmarks/conformance.json

Each check trains or evaluates a small pipeline on CPUs; tests/behaviours/rows/training has the
checks. An engine is a pipeline of this library or of another one. Every engine runs each check, and
the result is compared with that of the same layers without a pipeline. Two engines need packages:

    pip install --no-deps --target DIR torchgpipe==0.0.7     # then pass --older DIR
    pip install --target DIR deepspeed                       # then pass --deepspeed DIR

`--deepspeed` is not needed if DeepSpeed is installed.
"""

import importlib.util
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import get_args

from msgspec.structs import replace

from benchmarks.harness import Found, by_case, cell, collect, command, in_format, start
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
    """Run the chosen checks with the chosen engines, record the results, and print a table."""
    options = _options(arguments)
    engines = _engines(options)
    options.engine = list(engines)
    checks = options.check or list(CHECKS)
    record = start(options, "conformance", "what pipelines get right", {}, devices=2)
    software = {}
    for name, adapter in engines.items():
        if name in PACKAGES:
            package = PACKAGES[name]
            path = [adapter.folder] if adapter.folder else sys.path
            software[package] = next(iter(distributions(name=package, path=path))).version
    record = replace(record, software=software)
    found = check(checks, engines)
    shown = in_format(options.format, table)
    collect(record, options.out, found, len(checks), shown)


def _options(arguments: Sequence[str] | None) -> Namespace:
    parser = command("conformance", __doc__ or "")
    add = parser.add_argument
    add("check", nargs="*", metavar="CHECK", help="these checks only, by name")
    names = list(ENGINES)
    add("--engine", nargs="+", choices=names, default=names, help="these engines only")
    add("--older", type=Path, metavar="DIR", help="where torchgpipe 0.0.7 is")
    deepspeed = "where DeepSpeed is, if it is not installed"
    add("--deepspeed", type=Path, metavar="DIR", help=deepspeed)
    options = parser.parse_args(arguments)
    for name in options.check:
        if name not in CHECKS:
            parser.error(f"there is no check {name!r}; the checks are {', '.join(CHECKS)}")
    return options


def _engines(options: Namespace) -> dict[str, Adapter]:
    """Return the chosen engines that are installed, and prepare their imports.

    The packages of the engines become importable in the processes that run the engines.
    """
    engines = {name: ENGINES[name] for name in options.engine}
    if options.deepspeed:
        sys.path.append(str(options.deepspeed))
    installed = {
        "0.0.7": options.older is not None,
        "DeepSpeed": importlib.util.find_spec("deepspeed") is not None,
    }
    for name in list(engines):
        if not installed.get(name, True):
            print(f"{name} is left out: it is not installed, see --help", file=sys.stderr)
            del engines[name]
    if "0.0.7" in engines:
        folder = options.older.absolute()
        engines["0.0.7"] = engines["0.0.7"]._replace(folder=str(folder))
    if "DeepSpeed" in engines:
        PRELOADED.append("deepspeed.pipe")
    return engines


def check(checks: Sequence[str], engines: dict[str, Adapter]) -> Found:
    """Yield a list of results for each check: one result for each engine."""
    for name in checks:
        results = []
        for engine, adapter in engines.items():
            kind, said = run(CHECKS[name], adapter)
            outcome = {"outcome": kind}
            result = Result(name, engine, "measured", values=outcome, reason=said or None)
            results.append(result)
        yield results


def table(record: Record, style: str = "simple", first: Sequence[list[str]] = ()) -> str:
    """Render two tables: how often each engine had each outcome, and the results of all checks.

    The second table has a column for this library's results and a column for the results of other
    libraries. Its first lines are those of `first`.
    """
    cases = by_case(record)
    engines = list(dict.fromkeys(result.row for result in record.results))
    summary = []
    for engine in engines:
        counts: Counter[str] = Counter()
        for ends in cases.values():
            if engine in ends:
                outcome = str(ends[engine].values["outcome"])
                counts[outcome] += 1
        package = PACKAGES.get(engine)
        version = "this library"
        if package is not None:
            version = f"{package} {(record.software or {})[package]}"
        summary.append([engine, version, *(str(counts[kind] or "") for kind in KINDS)])
    rows = list(first)
    group = ""
    for name, ends in cases.items():
        check = CHECKS[name]
        if check.group != group:
            group = check.group
            rows.append([f"**{group}**", "", "", ""])
        here: list[Result] = []
        elsewhere: list[Result] = []
        for engine in engines:
            if engine in ends:
                side = elsewhere if engine in PACKAGES else here
                side.append(ends[engine])
        rows.append([name, ended(here), check.why, ended(elsewhere)])
    counted = grid(["engine", "version", *KINDS], summary, style)
    heads = ["", "here", "why it matters, or what to know", "elsewhere"]
    checked = grid(heads, rows, style)
    return f"{counted}\n\n{checked}"


def ended(results: Sequence[Result]) -> str:
    """Return a text about the results of one check, such as "fails (ranks): …" or "right".

    It names the engines that did not get the results of the plain layers, each with its outcome.
    """
    if not results:
        return ""
    engines_by_end: dict[tuple[str, str], list[str]] = {}
    for result in results:
        kind = str(result.values["outcome"])
        if kind != "equal":
            end = kind, cell(result.reason)
            engines_by_end.setdefault(end, []).append(result.row)
    ends = []
    for (kind, reason), engines in engines_by_end.items():
        names = ", ".join(engines)
        ends.append(f"{kind} ({names}): {reason}")
    return "; ".join(ends) or "right"


if __name__ == "__main__":
    main()
