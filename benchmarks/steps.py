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

import argparse
import itertools
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.child import ROOT, Child
from benchmarks.circumstances import circumstances, keep
from benchmarks.steps_child import MODELS, PRECISIONS
from reproduce.machine.allocator import keep_freed_memory
from reproduce.regression.interleave import folder_with_torchgpipe

__all__ = ["main", "table"]

LAYOUTS = ("contiguous", "channels_last")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every combination and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.steps", description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=folder_with_torchgpipe, metavar="DIR", help="folder with another torchgpipe")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--scale", default="full", choices=list(MODELS))
    parser.add_argument("--model", nargs="+", choices=list(MODELS["full"]), help="default: all of the scale")
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=["fp32"])
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, default=["contiguous"])
    parser.add_argument("--partitions", type=int, nargs="+", default=[1, 2, 4], metavar="n")
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 4, 32], metavar="m")
    parser.add_argument("--checkpoint", default="except_last", choices=["never", "except_last", "always"])
    parser.add_argument("--batch", type=int, default=32, help="samples of a mini-batch (default 32)")
    parser.add_argument("--rounds", type=int, default=20, help="steps of each (default 20)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample to FILE, as they come")
    options = parser.parse_args(arguments)
    models = options.model or list(MODELS[options.scale])
    fits = min(options.chunks) >= 1 and max(options.chunks) <= options.batch
    if options.rounds < 1 or min(options.partitions) < 1 or not fits:
        parser.error("--rounds and --partitions must be at least 1, --chunks from 1 to the batch")
    if missing := [model for model in models if model not in MODELS[options.scale]]:
        parser.error(f"--model {missing[0]}: at scale {options.scale} there are {', '.join(MODELS[options.scale])}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no CUDA device here; give --device cpu --scale small")

    if arguments is None:
        keep_freed_memory()
    under = circumstances()
    children = {"plain": Child("steps_child.py", ROOT), "here": Child("steps_child.py", ROOT)}
    if options.against is not None:
        children["other"] = Child("steps_child.py", options.against)
    result: dict[str, Any] = {
        "what": f"batch {options.batch}, {options.checkpoint}, {options.device}, models at {options.scale} scale",
        "versions": {name: "plain loop" if name == "plain" else child.version for name, child in children.items()},
        "cases": {},
    }
    order = random.Random(0)
    try:
        for model, precision, layout, n, m in itertools.product(
            models, options.precision, options.layout, options.partitions, options.chunks
        ):
            asked = {"model": model, "scale": options.scale, "precision": precision, "layout": layout, "n": n, "m": m,
                     "batch": options.batch, "checkpoint": options.checkpoint, "device": options.device}  # fmt: skip
            name = f"{model} {precision} {layout} n={n} m={m}"
            result["cases"][name] = compare(children, asked, options.rounds, order)
            if options.json is not None:
                keep(options.json, "steps", under, result)
            print(f"\r{name}".ljust(79), end="", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        for child in children.values():
            child.close()
        print(file=sys.stderr)
        if result["cases"]:
            print(table(result))


def compare(children: dict[str, Child], asked: dict[str, Any], rounds: int, order: random.Random) -> dict[str, Any]:
    """Return the seconds, the peak and the waits of each, or why it cannot run."""
    found: dict[str, Any] = {name: {"seconds": []} for name in children}

    def ask(name: str, what: str, *asked: Any) -> Any:
        answer = children[name].ask(what, *asked)
        if isinstance(answer, str):
            found[name] = {"unable": answer}
        return answer

    for name in children:
        ask(name, "plain" if name == "plain" else "gpipe", asked)
    for _ in range(rounds):
        for name in order.sample(list(children), len(children)):
            if "seconds" in found[name] and not isinstance(seconds := ask(name, "seconds"), str):
                found[name]["seconds"].append(seconds)
    for what in ("peak", "waits"):
        for name in children:
            if "seconds" in found[name] and not isinstance(count := ask(name, what), str):
                found[name][what] = count
    return found


def table(result: dict[str, Any], style: str = "simple") -> str:
    """Render milliseconds, ratios to ours, peaks and waits; below, each ratio's lowest and geometric mean, and why what
    is left out cannot run."""
    from tabulate import tabulate

    versions = result["versions"]
    rows: list[dict[str, str]] = []
    ratios: dict[str, list[float]] = {name: [] for name in versions if name != "here"}
    left_out: dict[str, list[str]] = {}
    for case, found in result["cases"].items():
        row = {"case": case}
        for name, title in versions.items():
            one = found[name]
            row[f"{title}, ms"] = "-" if "unable" in one else f"{statistics.median(one['seconds']) * 1e3:.1f}"
            if "unable" in one:
                left_out.setdefault(f"{title}: {one['unable']}", []).append(case)
        for name in ratios:
            if "seconds" in found[name] and "seconds" in found["here"]:
                pairs = zip(found[name]["seconds"], found["here"]["seconds"], strict=True)
                ratios[name].append(statistics.median(theirs / ours for theirs, ours in pairs))
                row[f"x {versions[name]}"] = f"{ratios[name][-1]:.2f}"
        for title, key, unit, digits in (("GiB", "peak", 2**30, 2), ("waits", "waits", 1, 0)):
            values = [found[name].get(key) for name in versions]
            if any(value is not None for value in values):
                row[title] = " / ".join("-" if value is None else f"{value / unit:.{digits}f}" for value in values)
        rows.append(row)
    lines = [
        f"- x {versions[name]}: lowest {min(found):.2f}, geometric mean {statistics.geometric_mean(found):.2f}, "
        f"of {len(found)}"
        for name, found in ratios.items()
        if found
    ]
    lines += [f"- {why} ({len(cases)} of {len(rows)})" for why, cases in left_out.items()]
    body = tabulate(rows, headers="keys", disable_numparse=True, tablefmt=style)
    return "\n".join([f"{result['what']}\n", f"{body}\n", *lines])


if __name__ == "__main__":
    main()
