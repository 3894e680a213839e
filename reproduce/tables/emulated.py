"""Make tables that compare emulated throughputs with predicted ones, and a column about the host.

On GPUs, a thread of the host issues tasks, that is, launches their kernels. Usually, an emulation
assumes that each device has such a thread of its own. The column about the host says which share of
the throughput is left if a single thread issues the tasks of all devices, which may be slower.
"""

from collections.abc import Iterable, Iterator
from statistics import median

from reproduce.numbers.match import grouped
from reproduce.numbers.metrics import throughput, throughputs
from reproduce.predict.rows import UNORDERED
from reproduce.records.record import Fields, Record, Result
from reproduce.tables.layout import Column, Table, number, ratio, table
from reproduce.tables.rows import ROW, by_row
from torchgpipe.plan.planner import HERE


def _with_one_thread(result: Result) -> float | None:
    """Return which share of a row's emulated samples/s is left if one thread issues all tasks."""
    speed = throughput(result)
    seconds = result.values.get("one_thread_time")
    if speed is None or seconds is None:
        return None
    return float(result.config["batch_size"] / seconds / speed.middle)


ONE_THREAD = Column("with one\nthread", _with_one_thread, "{:.0%}")
"""The column of the share of the emulated speed that is left if one thread issues all tasks."""


def about_one_thread(results: Iterable[Result]) -> Iterator[str]:
    """Yield a note that explains the column `ONE_THREAD`, if a row has a number in this column."""
    if any(map(_with_one_thread, results)):
        yield (
            "with one thread: share of the emulated samples/s that is left if one thread of the "
            "host issues the tasks of all GPUs, as in one process; below 100%, GPUs wait for the "
            "thread, and a process for each GPU (ranks) is faster"
        )


def _why_apart(emulated: Record, hardware: Fields) -> str:
    """Return why emulated and predicted speeds of a run can be far apart."""
    run = emulated.run
    if run is not None and run.device == "cpu" and hardware.get("name") != HERE:
        return (
            f"the run was on CPUs, and the predictions are for {hardware.get('name')}: give "
            f"--hardware {HERE} to predict this machine"
        )
    return "where they part, one of the two is wrong, or the machine was busier in one of them"


def beside_emulated(emulated: Record, predicted: Record) -> list[Table]:
    """Return tables that compare the emulated with the predicted throughput of each row.

    A row is a configuration of an experiment. There is a table for each experiment.

    Args:
        emulated: The record (file of results) of a run with emulated rows.
        predicted: The record with predictions for the same rows.
    """
    hardware = predicted.hardware or {}
    how = f"nothing run, from the hardware description {hardware.get('name')}"
    if hardware.get("name") == HERE:
        how = "from the layers' times on this machine"
    sources = f"predicted: {how}; emulated: {emulated.name}"
    rows = [result for result in emulated.results if result.status == "emulated"]
    made = []
    for experiment, own in grouped(rows, lambda result: result.experiment).items():
        foreseen = {}
        for result in predicted.results:
            if result.experiment == experiment:
                foreseen[result.row] = result.values["throughput"]
        ratios = {}
        off = []
        for row, speed in throughputs(own).items():
            if row not in foreseen:
                continue
            ratios[row] = foreseen[row] / speed
            off.append(abs(ratios[row] - 1))
        columns = [
            ROW,
            Column("samples/s\nemulated", throughput, number),
            by_row("predicted", foreseen, number),
            by_row("predicted/\nemulated", ratios, ratio),
        ]
        notes = [sources]
        if len(off) < len(own):
            notes.append(f"rows without a prediction: {UNORDERED}")
        if off:
            apart = f"apart: median {median(off):.1%}, at most {max(off):.1%}"
            notes.append(f"{apart}; {_why_apart(emulated, hardware)}")
        title = f"{experiment}: emulated and predicted"
        made.append(table(title, columns, own, notes))
    return made
