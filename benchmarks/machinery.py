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
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.machinery_child import PLAIN, Sample

CASES = [
    (n, m, checkpoint) for checkpoint in ("never", "always") for n in (1, 2, 4, 8) for m in (1, 8, 32)
]
ROOT = Path(__file__).resolve().parent.parent


class Child:
    """A process that measures one version."""

    def __init__(self, path: Path) -> None:
        script = Path(__file__).with_name("machinery_child.py")
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script)],
            env={**os.environ, "PYTHONPATH": str(path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.version: str = self._read()

    def measure(self, n: int, m: int, checkpoint: str, steps: int) -> list[Sample]:
        """Return (forward, backward) seconds per task of each step."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([n, m, checkpoint, steps]) + "\n")
        self._process.stdin.flush()
        return [(f, b) for f, b in self._read()]

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"machinery: the measuring process ended with exit code {self._process.wait()}")
        return json.loads(line)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every case and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.machinery", description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path, metavar="DIR", help="folder with another torchgpipe")
    parser.add_argument("--rounds", type=int, default=5, help="turns that each version gets per case (default 5)")
    parser.add_argument("--steps", type=int, default=20, help="steps per turn (default 20)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample to FILE")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.steps < 1:
        parser.error("--rounds and --steps must be at least 1")
    if options.against is not None and not (options.against / "torchgpipe").is_dir():
        parser.error(f"--against {options.against}: there is no torchgpipe in this folder")

    children = {"here": Child(ROOT)}
    if options.against is not None:
        children["other"] = Child(options.against)
    samples: dict[str, dict[str, list[Sample]]] = {}
    try:
        for n, m, checkpoint in CASES:
            case = samples.setdefault(f"n={n} m={m} {checkpoint}", {})
            for _ in range(options.rounds):
                for name, child in children.items():
                    case.setdefault(name, []).extend(child.measure(n, m, checkpoint, options.steps))
                case.setdefault("plain", []).extend(children["here"].measure(n, m, PLAIN[checkpoint], options.steps))
            print(f"\r{len(samples)}/{len(CASES)} cases", end="", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        for child in children.values():
            child.close()
        print(file=sys.stderr)

    versions = {name: child.version for name, child in children.items()}
    print(table(samples, versions))
    if options.json is not None:
        options.json.write_text(json.dumps({"versions": versions, "seconds_per_task": samples}) + "\n")


def table(samples: dict[str, dict[str, list[Sample]]], versions: dict[str, str]) -> str:
    """Render medians in µs per task: forward, backward, both; and the ratio of ours to the other's for both."""
    from tabulate import tabulate

    rows = []
    for case, by_name in samples.items():
        row, both = [case], {}
        for name in ("plain", *versions):
            forward, backward = (statistics.median(side) * 1e6 for side in zip(*by_name[name], strict=True))
            both[name] = statistics.median(sum(pair) for pair in by_name[name]) * 1e6
            row.append(f"{forward:.0f} + {backward:.0f} = {both[name]:.0f}")
        if "other" in both:
            row.append(f"{both['here'] / both['other']:.2f}")
        rows.append(row)
    headers = ["case", "plain loop", *versions.values()]
    return tabulate(rows, headers=[*headers, "ratio"] if "other" in versions else headers, disable_numparse=True)


if __name__ == "__main__":
    main()
