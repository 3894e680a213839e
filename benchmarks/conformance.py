"""What a pipeline must get right, and which of several pipelines do.

    python -m benchmarks.conformance --json results/benchmarks/conformance.json

Each check trains or evaluates a small pipeline of two or three partitions on CPUs, once by each engine: this library's
threads and ranks, PyTorch's `ScheduleGPipe` and `Schedule1F1B`, and DeepSpeed's pipeline, where `pip install deepspeed`
has been. What can then be seen of it is compared with what the plain layers do.
"""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from typing import get_args

from msgspec.structs import replace

from benchmarks.conformance_checks import CHECKS
from benchmarks.conformance_engines import Pipeline, Ranks, Threads
from benchmarks.conformance_ranks import PRELOADED, Kind, run
from benchmarks.conformance_theirs import DeepSpeed, Torch1F1B, TorchGPipe
from benchmarks.harness import Found, by_case, command, keep, render, start
from reproduce.records.record import Record, Result

ENGINES: dict[str, type[Pipeline]] = {
    "threads": Threads,
    "ranks": Ranks,
    "ScheduleGPipe": TorchGPipe,
    "Schedule1F1B": Torch1F1B,
    "DeepSpeed": DeepSpeed,
}
PACKAGES = {"ScheduleGPipe": "torch", "Schedule1F1B": "torch", "DeepSpeed": "deepspeed"}
KINDS: tuple[Kind, ...] = get_args(Kind)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run checks by engines, keep how each ended, and print a table."""
    parser = command("conformance", __doc__ or "")
    parser.add_argument("check", nargs="*", metavar="CHECK", help="these checks only, by name")
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=[*ENGINES], help="these engines only")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.check if name not in CHECKS]:
        parser.error(f"there is no check {unknown[0]!r}; the checks are {', '.join(CHECKS)}")
    if importlib.util.find_spec("deepspeed") is None:
        if options.engine == ["DeepSpeed"]:
            parser.error("DeepSpeed is not installed: pip install deepspeed")
        if "DeepSpeed" in options.engine:
            print("DeepSpeed is not installed, and left out: pip install deepspeed", file=sys.stderr)
        options.engine = [name for name in options.engine if name != "DeepSpeed"]
    PRELOADED.extend(["deepspeed"] * ("DeepSpeed" in options.engine))
    checks = options.check or [*CHECKS]
    record = start(options, "conformance", "what pipelines get right", {}, devices=2)
    software = {package: version(package) for name in options.engine if (package := PACKAGES.get(name))}
    record = replace(record, software={**software})
    keep(record, options.json, found(checks, options.engine), len(checks), table)


def found(checks: Sequence[str], engines: Sequence[str]) -> Found:
    """Yield how each check ends by each engine."""
    for name in checks:
        results = []
        for engine in engines:
            kind, said = run(CHECKS[name], ENGINES[engine])
            results.append(Result(name, engine, "measured", values={"outcome": kind}, reason=said or None))
        yield results


def table(record: Record, style: str = "simple") -> str:
    """Render how many checks end how, the table of all, and what there is to say of those that are not equal."""
    cases = by_case(record)
    engines = list(dict.fromkeys(result.row for result in record.results))
    kinds = {(r.experiment, r.row): str(r.values["outcome"]) for r in record.results}
    summary = []
    for engine in engines:
        counts = Counter(kind for (_, row), kind in kinds.items() if row == engine)
        package = PACKAGES.get(engine)
        of = "this library" if package is None else f"{package} {(record.software or {})[package]}"
        summary.append([engine, of, *(str(counts[kind] or "") for kind in KINDS)])
    rows, details = [], []
    group = ""
    for name in cases:
        check = CHECKS[name]
        rows.append([check.group if check.group != group else "", name, check.why,
                     *(kinds.get((name, engine), "") for engine in engines)])  # fmt: skip
        group = check.group
        said: dict[tuple[str, str], list[str]] = {}
        for engine in engines:
            if (result := cases[name].get(engine)) is not None and result.reason:
                said.setdefault((kinds[name, engine], _shown(result.reason)), []).append(engine)
        details += [[name, ", ".join(who), how, what] for (how, what), who in said.items()]
    return "\n\n".join(
        [
            render(["engine", "version", *KINDS], summary, style),
            render(["group", "check", "what must hold, and why", *engines], rows, style),
            render(["check", "engine", "how it ends", "what is said, or differs"], details, style),
        ]
    )


def _shown(reason: str) -> str:
    text = reason.replace("|", "\\|").replace("<", "&lt;")
    return text if len(text) <= 160 else f"{text[:159]}…"


if __name__ == "__main__":
    main()
