"""Make the tables that compare the emulated and the predicted throughput of a run's rows."""

from statistics import median

from reproduce.numbers.match import grouped
from reproduce.numbers.metrics import throughput, throughputs
from reproduce.records.record import Record
from reproduce.tables.layout import Column, Table, number, ratio, table
from reproduce.tables.rows import ROW, by_row
from torchgpipe.plan.planner import HERE


def beside_emulated(emulated: Record, predicted: Record) -> list[Table]:
    """Return a table for each experiment of a run: its rows' emulated and predicted throughput.

    `emulated` is the record of the run, and `predicted` is the record of the predictions.
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
            ratios[row] = foreseen[row] / speed
            off.append(abs(ratios[row] - 1))
        columns = [
            ROW,
            Column("samples/s\nemulated", throughput, number),
            by_row("predicted", foreseen, number),
            by_row("predicted/\nemulated", ratios, ratio),
        ]
        apart = f"apart: median {median(off):.1%}, at most {max(off):.1%}"
        notes = [sources, f"{apart}; where they part, one of the two is wrong"]
        title = f"{experiment}: emulated and predicted"
        made.append(table(title, columns, own, notes))
    return made
