"""Measure the overhead of pipelines, compared with a plain loop or with another torchgpipe version.

A plain loop runs the same layers on one micro-batch after another, without a pipeline.
docs/measured.md has the commands. The table has two times: that of `model(x)`, and that of
`loss.backward()`. Each is the median over all steps, divided by the number of tasks (n partitions
times m micro-batches), in microseconds per task. The time of the layers is included.

For each engine, the table also has a ratio: the engine's total time, divided by the total time of
the plain loop. If the option `--base` names another version, the divisor is the total time of the
same engine in the other version. (If the other version has only one engine, the divisor is the
total time of this engine.) On CUDA, all partitions are on one GPU.
"""

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.gates.base import add_base, package_folder, version
from benchmarks.gates.machinery_child import MODELS, MODES
from benchmarks.harness import Found, by_case, collect, command, in_format, positive, start
from benchmarks.pipelines import ENGINES
from reproduce.machine.description import ROOT
from reproduce.records.record import Record, Result
from reproduce.regression.job import in_turn
from reproduce.tables.layout import grid

DIRECTIONS = ("forward", "backward")
BOTH = "both"
OTHER = "other"
WAYS = ["plain", OTHER]
for engine in ENGINES:
    WAYS += [f"{engine}, {OTHER}", engine]


Turns = Sequence[Sequence[Sequence[float]]]
"""The seconds of forward and backward per task, of each step of each turn."""


class Side(NamedTuple):
    """A version of torchgpipe to measure: its folder, and the text that names the version."""

    folder: Path
    version: str


class Case(NamedTuple):
    """A model to measure, with n partitions and m micro-batches."""

    model: str
    checkpoint: str
    n: int
    m: int

    def __str__(self) -> str:
        model = "" if self.model == "linear" else f"{self.model} "
        return f"{model}n={self.n} m={self.m} {self.checkpoint}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every case (a model with its numbers of partitions and micro-batches).

    Store the results in a record (a file), and print them as a table.
    """
    parser = command("gates.machinery", __doc__, rounds=5, steps=20, seed=0)
    add = parser.add_argument
    add_base(parser, "another version of torchgpipe to measure, too")
    add("--model", nargs="+", choices=MODELS, default=["linear"])
    add("--checkpoint", nargs="+", choices=MODES, default=["never", "always"])
    add("--partitions", type=positive, nargs="+", default=[1, 2, 4, 8], metavar="n")
    add("--chunks", type=positive, nargs="+", default=[1, 8, 32], metavar="m")
    add("--on", choices=["cpu", "cuda"], default="cpu", help="kind of devices (default cpu)")
    options = parser.parse_args(arguments)
    on_gpu = options.on == "cuda"
    if on_gpu and not torch.cuda.is_available():
        advice = "leave it out to measure on the CPU"
        parser.error(f"--on cuda: there is no CUDA device here; {advice}")
    devices = 1 if on_gpu else max(options.partitions)
    unit = dict.fromkeys((*DIRECTIONS, BOTH), "us/task")
    record = start(options, "gates.machinery", "time per task", unit, devices=devices)
    every = product(options.model, options.checkpoint, options.partitions, options.chunks)
    cases = [Case(*each) for each in every]
    found = measure(options, cases)
    shown = in_format(options.format, table)
    collect(record, options.out, found, len(cases), shown)


def measure(options: Namespace, cases: Sequence[Case]) -> Found:
    """Yield the results of each case."""
    with ExitStack() as stack:
        sides = [Side(ROOT, version(ROOT))]
        if options.base is not None:
            other = stack.enter_context(package_folder(options.base))
            name = f"torchgpipe {options.base}"
            if isinstance(options.base, Path):  # and not the name of a git revision
                name = version(other)
            sides.append(Side(other, name))
        for number, case in enumerate(cases):
            yield _measured(options, sides, case, options.seed + number)


def _measured(options: Namespace, sides: Sequence[Side], case: Case, seed: int) -> list[Result]:
    """Measure a case with the plain loop, and with each engine of each torchgpipe version.

    The loop and the engines take turns, in a random order that depends on the seed.
    """
    engines = ENGINES if case.n > 1 and options.on == "cpu" else ENGINES[:1]
    ways: dict[str, tuple[int, str | None]] = {"plain": (0, "plain")}  # number of side, engine
    for engine in engines:
        ways[engine] = 0, engine
    if len(sides) > 1:
        if sides[1].version.startswith("torchgpipe 0.0."):  # version 0.0 has no option `engine`
            ways[OTHER] = 1, None
        else:
            for engine in engines:
                ways[f"{engine}, {OTHER}"] = 1, engine

    given = options.steps, case.model, case.n, case.m, case.checkpoint, options.on
    makers = {}
    for way, (side, engine_of_way) in ways.items():
        makers[way] = side, (*given, engine_of_way)
    job = {
        "folders": [str(side.folder) for side in sides],
        "package": "torchgpipe",
        "maker": "benchmarks.gates.machinery_child:prepare",
        "cases": {str(case): makers},
        "rounds": options.rounds,
        "seed": seed,
        "least": 1,
    }
    reasons: dict[str, str] = {}
    samples: dict[str, Turns] = {}
    with closing(in_turn(job, {})) as lines:
        for line in lines:
            reasons |= line.get("unable", {})
            samples |= line.get("samples", {})

    results = []
    for way, (side, _) in ways.items():
        config = {"version": sides[side].version}
        if way in samples:
            times = _microseconds(samples[way])
            result = Result(str(case), way, "measured", config=config, samples=times)
        else:
            reason = reasons.get(way)
            result = Result(str(case), way, "failed", reason=reason, config=config)
        results.append(result)
    return results


def _microseconds(turns: Turns) -> dict[str, list[float]]:
    """Return the times of forward, of backward, and of both together, in microseconds per task."""
    forwards, backwards, both = [], [], []
    for turn in turns:
        for seconds in turn:
            forward, backward = (1e6 * each for each in seconds)
            forwards.append(forward)
            backwards.append(backward)
            both.append(forward + backward)
    return {"forward": forwards, "backward": backwards, BOTH: both}


def table(record: Record, style: str = "simple") -> str:
    """Render a table: the median times per task of forward and backward, and the ratios."""
    cases = by_case(record)
    found_ways: set[str] = set()
    for found in cases.values():
        found_ways.update(found)
    ways = [way for way in WAYS if way in found_ways]
    titles = _titles(record)
    headers = ["case"]
    for way in ways:
        headers.append(titles.get(way, way))
        if way in ENGINES:
            headers.append("ratio")

    rows: list[list[str]] = []
    reasons: list[str] = []
    for case, found in cases.items():
        row = [case]
        for way in ways:
            row += _cells(way, found)
            if way in found and found[way].reason is not None:
                reason = f"- {titles.get(way, way)}: {found[way].reason}"
                if reason not in reasons:
                    reasons.append(reason)
        rows.append(row)
    lines = [grid(headers, rows, style)]
    if reasons:
        lines += ["", *reasons]
    return "\n".join(lines)


def _titles(record: Record) -> dict[str, str]:
    """Return a dictionary from the names of columns, such as "plain", to their titles.

    The dictionary has titles for the plain loop and for the other torchgpipe version. A column that
    is not in the dictionary has the name of an engine as its title.
    """
    name = ""
    for result in record.results:
        if result.row.endswith(OTHER):
            name = str(result.config["version"]).removeprefix("torchgpipe ")
            break
    titles = {"plain": "plain loop", OTHER: name}
    for engine in ENGINES:
        titles[f"{engine}, {OTHER}"] = f"{engine}, {name}"
    return titles


def _cells(way: str, found: Mapping[str, Result]) -> Iterator[str]:
    """Yield the table cells for one way to run a case, such as the plain loop or an engine.

    The cells have the times and, for an engine, the ratio.
    """
    values = found[way].values if way in found else {}
    if BOTH in values:
        yield f"{values['forward']:.0f} + {values['backward']:.0f}"
    else:
        yield ""
    if way in ENGINES:
        compared = (f"{way}, {OTHER}", OTHER, "plain")
        base = next(found[each] for each in compared if each in found).values
        both = BOTH in values and BOTH in base
        yield f"{values[BOTH] / base[BOTH]:.2f}" if both else ""


if __name__ == "__main__":
    main()
