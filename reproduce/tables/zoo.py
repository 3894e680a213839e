"""Make the table of many models: a line for each, with what pipelines of n partitions gain over one device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from reproduce.experiments import EQUAL_LAYERS, PLANNED, Experiment
from reproduce.numbers.metrics import outcome
from reproduce.records.record import Result
from reproduce.tables.layout import Column, Table
from reproduce.tables.rows import Rows, speed_text


def zoo_table(experiment: Experiment, results: Sequence[Result]) -> Table:
    """Return the table of all models so far; its group is the last of them."""
    rows = Rows(experiment, results)
    plain = Rows(experiment, [each for each in rows if each.config["partitions"] is None])
    table = plain.table("", _columns(rows), _notes(rows))
    return replace(table, group=str(results[-1].config["model"]))


def _columns(rows: Rows) -> Iterator[Column[Result]]:
    def measured(plain: Result) -> str | None:
        result = rows.measured(plain.row) if rows.emulated else plain
        return None if result is None else speed_text(result) or outcome(result)

    yield Column[Result]("model", lambda plain: plain.config["model"].rpartition(":")[2], left=True)
    yield Column("samples/s\nmeasured", measured)
    for n in sorted({each.config["partitions"] for each in rows if each.config["partitions"] is not None}):
        yield from _gains(rows, n)


def _gains(rows: Rows, n: int) -> Iterator[Column[Result]]:
    found = {
        (each.config["model"], each.config["configuration"]): each for each in rows if each.config["partitions"] == n
    }

    def gain(plain: Result, configuration: str) -> str | None:
        result = found.get((plain.config["model"], configuration))
        return None if result is None else rows.speed_up(result, result.over, quartiles=False) or outcome(result)

    def measured(plain: Result) -> str | None:
        result = found.get((plain.config["model"], PLANNED))
        return None if result is None else rows.measured_speed_up(result)

    yield Column(f"n={n}\nplan", lambda plain: gain(plain, PLANNED))
    yield Column(f"n={n}\nmeasured", measured)
    yield Column(f"n={n}\nequal", lambda plain: gain(plain, EQUAL_LAYERS))


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
