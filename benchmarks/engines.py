"""Threads, ranks and PyTorch's own schedules: what trains the two partitions of a pipeline fastest on two cores.

    python -m benchmarks.engines --json results/benchmarks/engines.json

`threads` is `GPipe`, `ranks` is `DistributedGPipe`, and `ScheduleGPipe` and `Schedule1F1B` are PyTorch's: two processes
linked by gloo. All take turns, one training step each per round, on the same layers, balance, samples and m
micro-batches, without checkpointing; their losses have to agree. The cases are two models; tasks of about 10 ms whose
micro-batches are messages of a given size; and short tasks, of about 0.2 ms. The last columns are medians over rounds
of an engine's time by that of `ranks`.
"""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial

from benchmarks.engines_work import CASES, SHORT, work
from benchmarks.harness import Found, by_case, command, keep, positive, render, start, turns
from reproduce.records.record import Engine, Record, Result
from reproduce.run.engines import FEW, SCHEDULES, Engaged, Work, check_same
from reproduce.run.processes import Processes

ENGINES: tuple[Engine, ...] = ("threads", "ranks", *SCHEDULES)
START = "start"
WARM_UP = 2  # rounds, of which the losses are compared
MORE_ROUNDS = 10  # times as many, of short tasks


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every case and print a table."""
    parser = command("engines", __doc__, rounds=15)
    parser.add_argument("--chunks", type=positive, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--case", choices=CASES, nargs="+", default=list(CASES))
    options = parser.parse_args(arguments)
    record = start(options, "engines", "threads, ranks and PyTorch's schedules", {"time": "s"}, devices=2)
    keep(record, options.json, measure(options), 1 + len(options.case) * len(options.chunks), table)


def measure(options: Namespace) -> Found:
    """Yield the seconds until processes are there, then the results of one case after another."""
    with ExitStack() as stack:
        processes: dict[Engine, Processes] = {}
        started = []
        for engine in ENGINES[1:]:
            began = time.perf_counter()
            processes[engine] = stack.enter_context(closing(Processes(2)))
            processes[engine].make("ranks", partial(work, SHORT, 1))
            started.append(time.perf_counter() - began)
        yield [Result(START, "ranks", "measured", samples={"time": started})]
        for name in options.case:
            for m in options.chunks:
                rounds = options.rounds * (MORE_ROUNDS if name == SHORT else 1)
                yield compared(f"{name}, m={m}", partial(work, name, m), processes, m, rounds)


def compared(
    case: str, make: Callable[..., Work], processes: dict[Engine, Processes], m: int, rounds: int
) -> list[Result]:
    """Return a case's results, of all engines that can run it."""
    steps: dict[str, Callable[[], tuple[float, float | None]]] = {"threads": partial(timed, Engaged("threads", make()))}
    results: list[Result] = []
    for engine, ranks in processes.items():
        if engine == "Schedule1F1B" and m < 2:
            results.append(Result(case, engine, "not run", reason=FEW))
        else:
            ranks.make(engine, make)
            steps[engine] = ranks.step
    first = {way: [step()[1] for _ in range(WARM_UP)] for way, step in steps.items()}
    for way, losses in first.items():
        check_same(losses, first["threads"], f"{case}, {way}")
    *_, found = turns(steps, rounds)
    measured = [
        Result(case, way, "measured", samples={"time": [seconds for seconds, _ in samples]})
        for way, samples in found.items()
    ]
    return [*measured, *results]


def timed(engaged: Engaged) -> tuple[float, float | None]:
    """Run a step; return its seconds and its loss."""
    began = time.perf_counter()
    loss = engaged.step()
    return time.perf_counter() - began, loss


def table(record: Record, style: str = "simple") -> str:
    """Render each engine's median in ms, and by how much `ranks` is faster; below, what starting takes."""
    cases = by_case(record)
    started = cases.pop(START, {})
    rows = []
    for case, found in cases.items():
        seconds = {way: each.samples["time"] for way, each in found.items() if each.samples}
        cells = [f"{statistics.median(seconds[way]) * 1e3:.1f}" if way in seconds else "-" for way in ENGINES]
        for way in ENGINES:
            if way != "ranks":
                ratios = [a / b for a, b in zip(seconds.get(way, []), seconds["ranks"], strict=False)]
                cells.append(f"{statistics.median(ratios):.2f}" if ratios else "")
        rows.append([case, *cells])
    headers = ["case", *(f"{way}, ms" for way in ENGINES), *(f"{way} / ranks" for way in ENGINES if way != "ranks")]
    lines = [render(headers, rows, style)]
    for each in started.values():
        lines.append(f"Two processes were ready {statistics.median(each.samples['time']):.1f} s after their start.")
    reasons = {f"{way}: {each.reason}" for found in cases.values() for way, each in found.items() if each.reason}
    return "\n\n".join([*lines, *(f"Not run: {reason}" for reason in sorted(reasons))])


if __name__ == "__main__":
    main()
