"""What the machinery costs per task, with layers that do next to nothing.

    python -m benchmarks.machinery                     # this checkout, beside a plain loop over the same layers
    python -m benchmarks.machinery --against DIR       # and beside another torchgpipe, in the same run

DIR is a folder that another version was installed into: pip install --no-deps --target DIR torchgpipe==0.0.7

Each version runs in a process of its own and the processes take turns, round by round, so that a drift of the
machine's speed meets all of them. A figure is the median over all rounds, in microseconds per task: the time of
`model(x)`, and of `loss.backward()`, over n·m. A task's `Linear(8, 8)` is part of it. Engines are the graph engine, as
it works on one device and `across` several, and workers; beside each is its ratio to the other version.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.child import ROOT, Child
from benchmarks.circumstances import circumstances, keep
from benchmarks.machinery_child import PLAIN, Sample
from benchmarks.pipelines import ENGINES
from reproduce.regression.interleave import folder_with_torchgpipe

CASES = [(n, m, checkpoint) for checkpoint in ("never", "always") for n in (1, 2, 4, 8) for m in (1, 8, 32)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every case and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.machinery", description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=folder_with_torchgpipe, metavar="DIR", help="folder with another torchgpipe")
    parser.add_argument("--rounds", type=int, default=5, help="turns that each version gets per case (default 5)")
    parser.add_argument("--steps", type=int, default=20, help="steps per turn (default 20)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample to FILE")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.steps < 1:
        parser.error("--rounds and --steps must be at least 1")

    under = circumstances()
    children = {"here": Child("machinery_child.py", ROOT)}
    if options.against is not None:
        children["other"] = Child("machinery_child.py", options.against)
    samples: dict[str, dict[str, list[Sample]]] = {}
    try:
        for n, m, checkpoint in CASES:
            case = samples.setdefault(f"n={n} m={m} {checkpoint}", {})
            asked = {"plain": ["here", PLAIN[checkpoint]], "other": ["other", checkpoint]}
            asked |= {engine: ["here", checkpoint, engine] for engine in ENGINES[: 1 if n == 1 else None]}
            for _ in range(options.rounds):
                for name, (version, *how) in asked.items():
                    if version in children:
                        case.setdefault(name, []).extend(children[version].ask(options.steps, n, m, *how))
            print(f"\r{len(samples)}/{len(CASES)} cases", end="", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        for child in children.values():
            child.close()
        print(file=sys.stderr)

    result = {
        "versions": {name: child.version for name, child in children.items()},
        "us_per_task": {
            case: {name: [[round(t * 1e6, 2) for t in pair] for pair in pairs] for name, pairs in by_name.items()}
            for case, by_name in samples.items()
        },
    }
    print(table(result))
    if options.json is not None:
        keep(options.json, "machinery", under, result)


def table(result: dict[str, Any], style: str = "simple") -> str:
    """Render medians in µs per task, forward + backward, and the ratios to the other version's for both."""
    from tabulate import tabulate

    versions, cases = result["versions"], result["us_per_task"]
    known = ("plain", "other", "here", *ENGINES)  # "here" is what older records have in place of engines
    names = [name for name in known if any(name in by_name for by_name in cases.values())]
    titles = {"plain": "plain loop", "other": versions.get("other", "").removeprefix("torchgpipe ")}
    judged = [name for name in names if "other" in versions and name not in titles]
    headers = ["case", *(title for x in names for title in (titles.get(x, x), *["ratio"] * (x in judged)))]
    rows = []
    for case, by_name in cases.items():
        row = [case]
        both = {name: statistics.median(map(sum, pairs)) for name, pairs in by_name.items()}
        for name in names:
            sides = zip(*by_name.get(name, []), strict=True)
            row.append(" + ".join(f"{statistics.median(side):.0f}" for side in sides))
            if name in judged:
                row.append(f"{both[name] / both['other']:.2f}" if name in both else "")
        rows.append(row)
    return tabulate(rows, headers, disable_numparse=True, tablefmt=style)


if __name__ == "__main__":
    main()
