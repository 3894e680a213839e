"""What becomes of a pipeline over ranks when something goes wrong with one of them, in each phase of a training.

    python -m benchmarks.faults --json results/benchmarks/faults.json
    python -m benchmarks.faults --torchrun --json results/benchmarks/faults.json

Each fault befalls each of four ranks in each phase. Every other rank has to end within the silence and two seconds,
with one error that names the rank, what it did, and its own message if there is one; and nothing may be left. Besides,
there are cases in which a rank is only slow, and nobody may be convicted. What the record has already is not run again
without `--again`. With `--torchrun`, each fault is run once, and what torchrun does is noted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

from benchmarks import faults_torchrun
from benchmarks.faults_cases import FAULTS, RANKS, Cell, all_cells
from benchmarks.faults_judge import error_in, judged
from benchmarks.faults_outside import Outside
from benchmarks.faults_table import TORCHRUN, table
from benchmarks.harness import command, continued, keep, start
from benchmarks.two_machines import again_apart, problem
from reproduce.records.record import Result, load

__all__ = ["main", "table"]

NO_NETWORKS = "networks of its own are not allowed here"


class Planned(NamedTuple):
    """A case, by its place in the record, and what runs it."""

    experiment: str
    row: str
    run: Callable[[Outside], Result]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run cases, keep what was seen, and print tables; exit with 1 where something was not as it has to be."""
    parser = command("faults", __doc__ or "")
    parser.add_argument("--only", nargs="+", metavar="CASE", default=[""],
                        help="these cases: 'killed', 'killed: forward', or 'killed: forward: rank 2'")  # fmt: skip
    parser.add_argument("--silence", type=float, default=2.0, metavar="S", help="in seconds (default 2)")
    parser.add_argument("--more", type=float, default=2.0, metavar="S",
                        help="that ranks may take after the silence (default 2)")  # fmt: skip
    parser.add_argument("--torchrun", action="store_true", help="each of the faults once, under torchrun")
    parser.add_argument("--again", action="store_true", help="also cases that the record has")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    there_are = (
        {fault: under(fault) for fault in FAULTS} if options.torchrun else {c.name: alone(c) for c in all_cells()}
    )
    chosen = {only: [case for name, case in there_are.items() if name.startswith(only)] for only in options.only}
    if unknown := [only for only, some in chosen.items() if not some]:
        parser.error(f"there is no case {unknown[0]!r}; the first are {', '.join(map(repr, [*there_are][:3]))}")
    if not options.inside:
        if (why := problem()) is None:
            again_apart("faults", arguments)
        print(f"{NO_NETWORKS} ({why}): links are not cut, and sockets and shared memory not looked at", file=sys.stderr)
    outside = Outside(private=options.inside, silence=options.silence, more=options.more)
    with closing(outside):
        cases = {(case.experiment, case.row): case.run for some in chosen.values() for case in some}
        del options.inside
        record = start(options, "faults", "faults of ranks", {"last": "s"}, devices=RANKS)
        if options.json is not None and options.json.exists():
            record = continued(record, load(options.json))
        there = {(each.experiment, each.row) for each in record.results if each.status != "not run"}
        todo = [run for key, run in cases.items() if options.again or key not in there]
        record = keep(record, options.json, ([run(outside)] for run in todo), len(todo), table)
    if any(each.status == "failed" and (each.experiment, each.row) in cases for each in record.results):
        raise SystemExit(1)


def alone(cell: Cell) -> Planned:
    """Return a case without torchrun."""
    return Planned(*cell.key, partial(run, cell))


def under(fault: str) -> Planned:
    """Return a case under torchrun."""
    return Planned(TORCHRUN, fault, partial(under_torchrun, fault))


def run(cell: Cell, outside: Outside) -> Result:
    """Return what comes of a case."""
    experiment, row = cell.key
    if cell.fault == "link cut" and not outside.private:
        return Result(experiment, row, "not run", reason=NO_NETWORKS)
    seen = outside.run(cell)
    wrong = judged(cell, seen, outside.silence + outside.more)
    others = {rank: end for rank, end in seen.ended.items() if rank != cell.victim}
    said = [(f"rank {rank}", what) for rank in sorted(others) if (what := error_in(seen.errors[rank]))]
    return Result(
        experiment,
        row,
        "failed" if wrong else "measured",
        reason="; ".join(wrong) or None,
        values={"last": max((round(end.seconds, 3) for rank, end in others.items()), default=0.0), **dict(said[:1])},
    )


def under_torchrun(fault: str, outside: Outside) -> Result:
    """Return what torchrun does, on each of its nodes."""
    if fault == "link cut" and not outside.private:
        return Result(TORCHRUN, fault, "not run", reason=NO_NETWORKS)
    nodes = faults_torchrun.run(outside, fault)
    values: dict[str, Any] = {
        "ended after": ", ".join("not at all" if node.seconds is None else f"{node.seconds:.1f}" for node in nodes),
        "blames": ", ".join(node.blamed for node in nodes),
        "errors": [error for node in nodes for error in node.errors if error],
    }
    return Result(TORCHRUN, fault, "measured", values=values)


if __name__ == "__main__":
    main()
