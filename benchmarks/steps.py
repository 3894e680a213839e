"""Training steps on one device: this pipeline, a plain loop with `torch.utils.checkpoint`, and another torchgpipe.

    python -m benchmarks.steps --against DIR                     # the papers' models, on a GPU
    python -m benchmarks.steps --device cpu --scale small --partitions 1 --chunks 4

DIR is a folder that another version was installed into: pip install --no-deps --target DIR torchgpipe==0.0.7

All partitions are on the one device, so nothing can overlap: it shows what the pipeline costs, or gains, beside a plain
loop over the same micro-batches and partitions, at the same batch and with the same micro-batches checkpointed. Each
has a process of its own and they take turns in an order that is drawn for every round. A figure is the median over
rounds of a whole forward, loss and backward, up to the moment when the device is done; a ratio is the median of the
rounds' ratios. GiB are the allocator's peak in a step, waits are the host's for the device within one: both of GPUs
only. On a CPU all of them are kept on one core. On a GPU they share its memory, so "out of memory" may be the others'
doing.
"""

from __future__ import annotations

import itertools
import statistics
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from msgspec.structs import replace

from benchmarks.child import ROOT, Child, children
from benchmarks.harness import Found, by_case, command, keep, positive, render, start, turns
from benchmarks.steps_child import MODELS, PRECISIONS
from reproduce.error import Error
from reproduce.machine.allocator import keep_freed_memory
from reproduce.records.record import Record, Result, Status

LAYOUTS = ("contiguous", "channels_last")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every combination and print a table."""
    parser = command("steps", __doc__, against=False, rounds=20)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--scale", default="full", choices=list(MODELS))
    parser.add_argument("--model", nargs="+", choices=list(MODELS["full"]), help="default: all of the scale")
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=["fp32"])
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, default=["contiguous"])
    parser.add_argument("--partitions", type=positive, nargs="+", default=[1, 2, 4], metavar="n")
    parser.add_argument("--chunks", type=positive, nargs="+", default=[1, 4, 32], metavar="m")
    parser.add_argument("--checkpoint", default="except_last", choices=["never", "except_last", "always"])
    parser.add_argument("--batch", type=positive, default=32, help="samples of a mini-batch (default 32)")
    options = parser.parse_args(arguments)
    options.model = options.model or list(MODELS[options.scale])
    if max(options.chunks) > options.batch:
        parser.error(f"--chunks {max(options.chunks)}: the batch has {options.batch} samples; give at most as many")
    if missing := [model for model in options.model if model not in MODELS[options.scale]]:
        parser.error(f"--model {missing[0]}: at scale {options.scale} there are {', '.join(MODELS[options.scale])}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no CUDA device here; give --device cpu --scale small")

    if arguments is None:
        keep_freed_memory()
    title = f"batch {options.batch}, {options.checkpoint}, {options.device}, models at {options.scale} scale"
    units = {"time": "s", "peak": "bytes", "waits": "1"}
    record = start(options, "steps", title, units, devices=1, device=options.device)
    cases = list(
        itertools.product(options.model, options.precision, options.layout, options.partitions, options.chunks)
    )
    keep(record, options.json, measure(options, cases), len(cases), table)


def measure(options: Namespace, cases: Sequence[tuple[str, str, str, int, int]]) -> Found:
    """Yield the results of one combination after another."""
    with children("steps_child.py", plain=ROOT, here=ROOT, other=options.against) as ways:
        for model, precision, layout, n, m in cases:
            asked = {"model": model, "scale": options.scale, "precision": precision, "layout": layout, "n": n, "m": m,
                     "batch": options.batch, "checkpoint": options.checkpoint, "device": options.device}  # fmt: skip
            yield compare(f"{model} {precision} {layout} n={n} m={m}", ways, asked, options.rounds)


def compare(case: str, ways: Mapping[str, Child], asked: dict[str, Any], rounds: int) -> list[Result]:
    """Return the seconds, the peak and the waits of each way, or why it cannot run."""
    unable: dict[str, str] = {}

    def ask(way: str, *request: Any) -> Any:
        if way not in unable:
            try:
                return ways[way].ask(*request)
            except Error as why:
                unable[way] = str(why)
        return None

    for way in ways:
        ask(way, "plain" if way == "plain" else "gpipe", asked)
    turn: dict[str, Callable[[], float | None]] = {way: partial(ask, way, "seconds") for way in ways}
    *_, seconds = turns(turn, rounds)
    counts = {way: {what: ask(way, what) for what in ("peak", "waits")} for way in ways}
    results = []
    for way, child in ways.items():
        result = Result(case, way, "measured", config={"version": "plain loop" if way == "plain" else child.version})
        if way in unable:
            status: Status = "out of memory" if unable[way] == "out of memory" else "failed"
            result = replace(result, status=status, reason=unable[way])
        else:
            samples = {"time": [each for each in seconds[way] if each is not None]}
            known = {what: count for what, count in counts[way].items() if count is not None}
            result = replace(result, samples=samples, values=known)
        results.append(result)
    return results


def table(record: Record, style: str = "simple") -> str:
    """Render milliseconds, ratios to ours, peaks and waits; below, each ratio's lowest and geometric mean, and why what
    is left out cannot run."""
    cases = by_case(record)
    versions = {way: str(each.config["version"]) for found in cases.values() for way, each in found.items()}
    rows: list[dict[str, str]] = []
    ratios: dict[str, list[float]] = {way: [] for way in versions if way != "here"}
    left_out: dict[str, list[str]] = {}
    for case, found in cases.items():
        row = {"case": case}
        seconds = {way: each.samples.get("time") for way, each in found.items()}
        for way, version in versions.items():
            own = seconds[way]
            row[f"{version}, ms"] = "-" if own is None else f"{statistics.median(own) * 1e3:.1f}"
            if own is None:
                left_out.setdefault(f"{version}: {found[way].reason}", []).append(case)
        for way in ratios:
            if (theirs := seconds[way]) is not None and (ours := seconds["here"]) is not None:
                ratios[way].append(statistics.median(a / b for a, b in zip(theirs, ours, strict=True)))
                row[f"x {versions[way]}"] = f"{ratios[way][-1]:.2f}"
        for title, key, unit, digits in (("GiB", "peak", 2**30, 2), ("waits", "waits", 1, 0)):
            values = [found[way].values.get(key) for way in versions]
            if any(value is not None for value in values):
                row[title] = " / ".join("-" if value is None else f"{value / unit:.{digits}f}" for value in values)
        rows.append(row)
    headers = list(dict.fromkeys(heading for row in rows for heading in row))
    lines = [
        f"- x {versions[way]}: lowest {min(found):.2f}, geometric mean {statistics.geometric_mean(found):.2f}, "
        f"of {len(found)}"
        for way, found in ratios.items()
        if found
    ]
    lines += [f"- {why} ({len(cases)} of {len(rows)})" for why, cases in left_out.items()]
    body = render(headers, [[row.get(heading, "") for heading in headers] for row in rows], style)
    return "\n".join([f"{record.title}\n", f"{body}\n", *lines])


if __name__ == "__main__":
    main()
