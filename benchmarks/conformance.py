"""Check which pipeline libraries do correctly what training needs.

    python -m benchmarks.conformance --out results/benchmarks/conformance.json

Each check trains or evaluates a small pipeline on CPUs. The folder tests/behaviours/rows/training
has the checks. An engine is a kind of pipeline of this library or of another one. Every engine runs
each check, and the result is compared with that of the same layers without a pipeline. Two engines
need packages:

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

from benchmarks.harness import (
    Found,
    by_case,
    cell,
    collect,
    command,
    in_format,
    section,
    start,
)
from benchmarks.others.processes import FALSE, NOWHERE, PRELOADED, Adapter, Kind, run
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
RIGHT = "right"
WORDS = {"equal": RIGHT, "not offered": "lacks"}
"""The words of tables for outcomes that have another name in records."""
SENTENCES = {
    "lacks": "there is no way to do this (*lacks*)",
    "refused": "this is *refused*",
    "fails": "this *fails*",
    "differs": "the result *differs*",
    "ends": "the process *ends*",
    "hangs": "the process *hangs*",
}
"""Sentences that say how a check ended. Each contains the word that the tables have for it."""
HEADS = {"ScheduleGPipe": "GPipe", "Schedule1F1B": "1F1B"}
"""The headings of columns that differ from the engine's name."""
IN_FULL = {"0.0.7": "torchgpipe 0.0.7", "threads": "worker threads"}
"""The names of engines in sentences, if they differ from the engine's name in records."""


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
    """Return the chosen engines whose packages are installed; say which others are left out.

    If the options `--older` and `--deepspeed` name folders, torchgpipe 0.0.7 and DeepSpeed are
    imported from these folders.
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
    """Run each check with each engine; yield, for each check, a list with a result per engine."""
    for name in checks:
        results = []
        for engine, adapter in engines.items():
            kind, said = run(CHECKS[name], adapter)
            outcome = {"outcome": kind}
            result = Result(name, engine, "measured", values=outcome, reason=said or None)
            results.append(result)
        yield results


def table(record: Record, style: str = "simple") -> str:
    """Render a table that counts each engine's outcomes, and then the results of all checks."""
    return f"{counted(record, style)}\n\n{checked(record, style)}"


def counted(record: Record, style: str) -> str:
    """Render a table that counts how often each engine was right, failed, and so on."""
    summary = []
    for engine in engines_of(record):
        own = [result for result in record.results if result.row == engine]
        counts = Counter([str(result.values["outcome"]) for result in own])
        package = PACKAGES.get(engine)
        version = "this library"
        if package is not None:
            version = f"{package} {(record.software or {})[package]}"
        summary.append([engine, version, *(str(counts[kind] or "") for kind in KINDS)])
    return grid(["engine", "version", *map(word, KINDS)], summary, style)


def checked(record: Record, style: str) -> str:
    """Render the results of all checks: for each group of checks, a table and a list.

    A table has one column for all engines of this library, and one for each other engine. The list
    says why each check matters. If an engine failed the check, the list has its error message.
    """
    groups: dict[str, dict[str, dict[str, Result]]] = {}
    for name, ends in by_case(record).items():
        groups.setdefault(CHECKS[name].group, {})[name] = ends
    others = [engine for engine in engines_of(record) if engine in PACKAGES]
    parts = []
    for group, cases in groups.items():
        rows = []
        notes = []
        for name, ends in cases.items():
            here = [end for engine, end in ends.items() if engine not in PACKAGES]
            rows.append([name, here_word(here), *(outcome(ends.get(each)) for each in others)])
            notes.append(f"**{name}**: {CHECKS[name].why} {reasons(list(ends.values()))}".strip())
        heads = ["", "here", *(HEADS.get(engine, engine) for engine in others)]
        parts.append(section(group, grid(heads, rows, style), notes, style))
    return "\n\n".join(parts)


def engines_of(record: Record) -> list[str]:
    return list(dict.fromkeys(result.row for result in record.results))


def word(kind: str) -> str:
    """Return the word that tables show for a recorded outcome, such as "right" for "equal"."""
    return WORDS.get(kind, kind)


def outcome(result: Result | None) -> str:
    """Return the cell of one engine's result."""
    return "" if result is None else word(str(result.values["outcome"]))


def here_word(results: Sequence[Result]) -> str:
    """Return the text for this library's results of one check in a table.

    This library has several engines. If all have the same outcome, the text is that outcome, such
    as "right". Otherwise, the text names each engine that was not right, and its outcome.
    """
    words = {result.row: outcome(result) for result in results}
    if len(set(words.values())) <= 1:
        return next(iter(words.values()), "")
    return ", ".join([f"{engine} {word}" for engine, word in words.items() if word != RIGHT])


def reasons(results: Sequence[Result]) -> str:
    """Return a text that says which engines did not get a check right, and why.

    An example is "With ScheduleGPipe and DeepSpeed, this *fails*: RuntimeError: …".
    """
    engines_by_end: dict[tuple[str, str], list[str]] = {}
    for result in results:
        if outcome(result) != RIGHT:
            end = outcome(result), cell(result.reason)
            engines_by_end.setdefault(end, []).append(result.row)
    ends = []
    for (kind, reason), engines in engines_by_end.items():
        *others, last = [IN_FULL.get(engine, engine) for engine in engines]
        listed = f"{', '.join(others)} and {last}" if others else last
        if reason.startswith(FALSE):
            reason = f'"{reason.removeprefix(FALSE)}" is false'
        if reason.endswith(NOWHERE):
            reason = f"no rank has {reason.removesuffix(NOWHERE)}"
        stop = "" if reason.endswith((".", "…")) else "."
        ends.append(f"With {listed}, {SENTENCES[kind]}: {reason}{stop}")
    return " ".join(ends)


if __name__ == "__main__":
    main()
