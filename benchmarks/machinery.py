"""What the machinery costs per task, with layers that do next to nothing.

    python -m benchmarks.machinery                     # this checkout, beside a plain loop over the same layers
    python -m benchmarks.machinery --against DIR       # and beside another torchgpipe, in the same run

DIR is a folder that another version was installed into: pip install --no-deps --target DIR torchgpipe==0.0.7

Each version runs in a process of its own and the processes take turns, round by round, so that a drift of the
machine's speed meets all of them. A figure is the median over all rounds, in microseconds per task: the time of
`model(x)`, or of `loss.backward()`, over n·m. A task's `Linear(8, 8)` is part of it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.child import ROOT, Child, folder_with_torchgpipe
from benchmarks.circumstances import circumstances, keep
from benchmarks.machinery_child import PLAIN, Sample

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
            for _ in range(options.rounds):
                for name, child in children.items():
                    case.setdefault(name, []).extend(child.ask(n, m, checkpoint, options.steps))
                case.setdefault("plain", []).extend(children["here"].ask(n, m, PLAIN[checkpoint], options.steps))
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
    """Render medians in µs per task: forward, backward, both; and the ratio of ours to the other's for both."""
    from tabulate import tabulate

    versions = result["versions"]
    rows = []
    for case, by_name in result["us_per_task"].items():
        row, both = [case], {}
        for name in ("plain", *versions):
            forward, backward = (statistics.median(side) for side in zip(*by_name[name], strict=True))
            both[name] = statistics.median(sum(pair) for pair in by_name[name])
            row.append(f"{forward:.0f} + {backward:.0f} = {both[name]:.0f}")
        if "other" in both:
            row.append(f"{both['here'] / both['other']:.2f}")
        rows.append(row)
    headers = ["case", "plain loop", *versions.values(), *(["ratio"] if "other" in versions else [])]
    return tabulate(rows, headers=headers, disable_numparse=True, tablefmt=style)


if __name__ == "__main__":
    main()
