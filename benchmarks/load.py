"""How much a busy machine moves a table: U-Net's rows like the published, quiet and beside a busy loop on each core.

    python -m benchmarks.load

In every round each row is emulated twice: once while nothing else runs, and once while every core runs a busy loop. The
order is drawn anew in each round. Tasks are timed by CPU time and on the clock, so that the two can be compared.
"""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.synchronize import Event

from benchmarks.harness import Found, command, keep, render, start, turns
from reproduce.experiments import EXPERIMENTS, LIKE_PUBLISHED
from reproduce.machine.allocator import keep_freed_memory
from reproduce.machine.devices import Devices, cores
from reproduce.records.record import Record, Result
from reproduce.run.emulation import Emulation, Executed, executed
from reproduce.run.training import Balancer, FakeData

EXPERIMENT = "unet-speed"
WAYS = ("quiet", "loaded")
CLOCKS = ("time", "clock")  # CPU time, and time on the clock


def _spin(go: Event) -> None:
    """Compute whenever asked to."""
    while go.wait():
        sum(range(10_000))


def _run(emulation: Emulation, go: Event, loaded: bool) -> tuple[Executed, Executed]:
    """Run a step's tasks, timed by CPU time and on the clock."""
    if loaded:
        go.set()
    try:
        run = emulation.run()
        return run, emulation.run(wall=True)
    finally:
        go.clear()


def main(arguments: Sequence[str] | None = None) -> None:
    """Emulate and print a table."""
    options = command("load", __doc__, rounds=10).parse_args(arguments)
    if arguments is None:
        keep_freed_memory()
    record = start(options, "load", "emulated speed-ups on a quiet and on a busy machine", {"time": "s", "clock": "s"},
                   devices=cores())  # fmt: skip
    keep(record, options.json, measure(options.rounds), options.rounds, table)


def measure(rounds: int) -> Found:
    """Yield all results after each round."""
    rows = [row for row in EXPERIMENTS[EXPERIMENT].scale("small").rows if row.configuration == LIKE_PUBLISHED]
    devices = Devices("cpu", cores(), threads=1)
    data, balancer = FakeData([executed(row) for row in rows], 0), Balancer(devices)
    emulations = {row.name: Emulation(row, devices, data, balancer, 0) for row in rows}
    context = multiprocessing.get_context("spawn")
    go = context.Event()
    busy = [context.Process(target=_spin, args=(go,), daemon=True) for _ in range(cores())]
    for process in busy:
        process.start()
    steps: dict[str, Callable[[], tuple[Executed, Executed]]] = {
        f"{name}, {way}": partial(_run, emulation, go, way == "loaded")
        for name, emulation in emulations.items()
        for way in WAYS
    }
    try:
        for samples in turns(steps, rounds, warm_up=1):
            yield [
                Result(name, way, "emulated", emulated=True, samples={
                    what: emulation.samples([both[k] for both in samples[f"{name}, {way}"]])["step_time"]
                    for k, what in enumerate(CLOCKS)
                })
                for name, emulation in emulations.items()
                for way in WAYS
            ]  # fmt: skip
    finally:
        for process in busy:
            process.kill()


def moves(record: Record) -> dict[str, dict[str, float]]:
    """Return by how much load moves each row's speed-up over the first, by CPU time and by the clock, as a share."""
    results = {(each.experiment, each.row): each for each in record.results}
    first = record.results[0].experiment

    def speed_up(row: str, way: str, what: str) -> float:
        ours, base = results[row, way].samples[what], results[first, way].samples[what]
        # The batch sizes cancel: the same rows stand on both sides.
        return statistics.median(b / a for a, b in zip(ours, base, strict=True))

    rows = [row for row in dict.fromkeys(case for case, _ in results) if row != first]
    return {row: {what: speed_up(row, "loaded", what) / speed_up(row, "quiet", what) - 1 for what in CLOCKS}
            for row in rows}  # fmt: skip


def table(record: Record, style: str = "simple") -> str:
    """Render how much each row's speed-up moved."""
    found = moves(record)
    rows = [[row, *(f"{each[what]:+.1%}" for what in CLOCKS)] for row, each in found.items()]
    for name, of in (("median, either way", statistics.median), ("largest", max)):
        rows.append([name, *(f"{of([abs(each[what]) for each in found.values()]):.1%}" for what in CLOCKS)])
    rounds = len(record.results[0].samples["time"])
    head = f"{EXPERIMENT}, {rounds} rounds: by how much a busy loop on each core moves speed-ups"
    return f"{head}\n\n{render(['row', 'by CPU time', 'by the clock'], rows, style)}"


if __name__ == "__main__":
    main()
