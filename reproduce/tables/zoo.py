"""Make the table of many models: a line for each, with what pipelines of n partitions gain over one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from reproduce.experiments import EQUAL_LAYERS, PLANNED, Experiment
from reproduce.numbers.metrics import outcome
from reproduce.records.record import Result
from reproduce.tables.layout import Column, Table
from reproduce.tables.rows import Rows, speed
from reproduce.tables.text import number, ratio


def zoo_table(experiment: Experiment, results: Sequence[Result]) -> Table:
    """Return the table of all models so far; its group is the last of them."""
    rows = Rows(experiment, results)
    plain = Rows(experiment, [each for each in rows if each.config["partitions"] is None])
    measured = Column("samples/s\nmeasured", speed, number)
    columns: list[Column[Result]] = [
        Column("model", lambda plain: plain.config["model"].rpartition(":")[2], left=True),
        measured.of(lambda plain: rows.measured(plain.row)) if rows.emulated else measured,
    ]
    for n in sorted({each.config["partitions"] for each in rows} - {None}):
        columns += _gains(rows, n)
    return replace(plain.table("", columns, _notes(rows)), group=str(results[-1].config["model"]))


def _gains(rows: Rows, n: int) -> Iterator[Column[Result]]:
    found = {
        (each.config["model"], each.config["configuration"]): each for each in rows if each.config["partitions"] == n
    }

    def row(configuration: str) -> Callable[[Result], Result | None]:
        return lambda plain: found.get((plain.config["model"], configuration))

    def gain(result: Result) -> object:
        return rows.speed_up(result) or outcome(result)

    yield Column(f"n={n}\nplan", gain, ratio).of(row(PLANNED))
    yield Column(f"n={n}\nmeasured", rows.measured_speed_up, ratio).of(row(PLANNED))
    yield Column(f"n={n}\nequal", gain, ratio).of(row(EQUAL_LAYERS))


def _notes(rows: Rows) -> Iterator[str]:
    yield rows.circumstances()
    how = {(each.config["chunks"], each.config["checkpoint"]) for each in rows if each.config["chunks"] is not None}
    yield from (
        f"n: speed-up of n devices over plain training on one, taken round by round; m={m}, checkpoint {mode}"
        for m, mode in sorted(how)
    )
    yield (
        "plan: in the balance of torchgpipe.plan, by a profile of the layers on this machine; equal: with equally many "
        "layers in each partition"
    )
    yield "nobody has published these rows"
    yield from rows.about_emulation(ratio=False)
    yield from rows.problems()
