"""What the machinery costs per task, with layers that do next to nothing.

    python -m benchmarks.machinery                     # this checkout, beside a plain loop over the same layers
    python -m benchmarks.machinery --against DIR       # and beside another torchgpipe, in the same run

DIR is a folder that another version was installed into: pip install --no-deps --target DIR torchgpipe==0.0.7

Each version runs in a process of its own and they take turns, so that a drift of the machine's speed meets all of
them. A figure is the median over all rounds, in microseconds per task: the time of `model(x)`, and of
`loss.backward()`, over n·m. A task's `Linear(8, 8)` is part of it. Engines are the graph engine, as it works on one
device and `across` several, and workers; beside each is its ratio to the other version.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Sequence
from functools import partial

from benchmarks.child import ROOT, children
from benchmarks.harness import Found, by_case, command, keep, render, start, turns
from benchmarks.machinery_child import PLAIN
from benchmarks.pipelines import ENGINES
from reproduce.records.record import Record, Result

CASES = [(n, m, checkpoint) for checkpoint in ("never", "always") for n in (1, 2, 4, 8) for m in (1, 8, 32)]
DIRECTIONS = ("forward", "backward")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every case and print a table."""
    options = command("machinery", __doc__, against=False, rounds=5, steps=20).parse_args(arguments)
    record = start(options, "machinery", "time per task", dict.fromkeys(DIRECTIONS, "us/task"), devices=8)
    keep(record, options.json, measure(options), len(CASES), table)


def measure(options: Namespace) -> Found:
    """Yield the results of one case after another."""
    with children("machinery_child.py", here=ROOT, other=options.against) as versions:
        for n, m, checkpoint in CASES:
            asked = {"plain": ["here", PLAIN[checkpoint]], "other": ["other", checkpoint]}
            asked |= {engine: ["here", checkpoint, engine] for engine in ENGINES[: 1 if n == 1 else None]}
            ways = {way: (versions[version], how) for way, (version, *how) in asked.items() if version in versions}
            turn = {way: partial(child.ask, options.steps, n, m, *how) for way, (child, how) in ways.items()}
            *_, found = turns(turn, options.rounds)
            results = []
            for way, (child, _) in ways.items():
                pairs = zip(*(pair for turn in found[way] for pair in turn), strict=True)
                samples = {x: [round(t * 1e6, 2) for t in times] for x, times in zip(DIRECTIONS, pairs, strict=True)}
                config = {"version": child.version}
                results.append(Result(f"n={n} m={m} {checkpoint}", way, "measured", config=config, samples=samples))
            yield results


def table(record: Record, style: str = "simple") -> str:
    """Render medians in µs per task, forward + backward, and the ratios to the other version's for both."""
    cases = by_case(record)
    known = ("plain", "other", "here", *ENGINES)  # "here" is what older records have in place of engines
    ways = [way for way in known if any(way in found for found in cases.values())]
    others = [str(found["other"].config["version"]) for found in cases.values() if "other" in found]
    titles = {"plain": "plain loop", "other": "".join(others[:1]).removeprefix("torchgpipe ")}
    judged = [way for way in ways if others and way not in titles]
    headers = ["case", *(title for way in ways for title in (titles.get(way, way), *["ratio"] * (way in judged)))]
    rows = []
    for case, found in cases.items():
        row = [case]
        for way in ways:
            samples = found[way].samples if way in found else {}
            row.append(" + ".join(f"{statistics.median(times):.0f}" for times in samples.values()))
            if way in judged:
                row.append(f"{_both(found[way]) / _both(found['other']):.2f}" if samples else "")
        rows.append(row)
    return render(headers, rows, style)


def _both(each: Result) -> float:
    """Return the median over steps of forward and backward together."""
    return statistics.median(map(sum, zip(*each.samples.values(), strict=True)))


if __name__ == "__main__":
    main()
