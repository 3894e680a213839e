"""Offer what several tables of an experiment have in common: its rows, columns and notes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from reproduce.experiments import Experiment
from reproduce.models import MODELS
from reproduce.numbers.metrics import outcome, speed_up, throughput, utilization
from reproduce.records.decode import Json
from reproduce.records.published import published
from reproduce.records.record import Record, Result
from reproduce.tables.layout import Column, many, span
from reproduce.tables.text import number, ratio, with_quartiles

__all__ = ["BUSY", "ROW", "SIZE", "THROUGHPUT", "Rows", "about_publication", "circumstances", "config", "problems",
           "speed_up_text", "what_busy_is"]  # fmt: skip

WHAT_BUSY_IS = {
    "cpu": "busy: share of a step's time in which the device's worker was in a task",
    "cuda": "busy: GPU utilization as the driver (NVML) reports it, mean over some steps",
}


@dataclass(frozen=True)
class Rows:
    """Hold the rows of a table."""

    experiment: Experiment
    results: Sequence[Result]

    def __iter__(self) -> Iterator[Result]:
        return iter(self.results)

    @property
    def publication(self) -> Record:
        """Give the published table that the rows reproduce."""
        return published(self.experiment.table)

    def base(self, result: Result) -> Result | None:
        """Return the row that a row is compared with; None where it is not in the table."""
        return self.named(result.over)

    def named(self, row: str | None) -> Result | None:
        """Return the row of that name; None where it is not in the table."""
        return _named(row, self.results)

    def paper(self, result: Result | None) -> Result | None:
        """Return the published row that a row reproduces; None where there is none."""
        link = None if result is None else result.published
        return _named(link and link.rpartition("/")[2], self.publication.results)

    def published_throughput(self, result: Result) -> str:
        """Write the published samples per second, of the same work alone: nothing at another scale than the papers'."""
        paper = self.paper(result) if result.scale == "paper" else None
        speed = None if paper is None else throughput(paper)
        return "" if speed is None else number(speed.middle)

    def published_speed_up(self, result: Result) -> str:
        """Write the speed-up of the published row over the one that the base reproduces."""
        times = speed_up(self.paper(result), self.paper(self.base(result)))
        return "" if times is None else ratio(times.middle)


def _named(row: str | None, results: Iterable[Result]) -> Result | None:
    return next((result for result in results if result.row == row), None)


def config(heading: str, name: str) -> Column[Result]:
    """Return the column of a field of the rows' configurations, a dash where it is None."""
    return Column(heading, lambda result: "-" if result.config[name] is None else str(result.config[name]))


def size(settings: Mapping[str, Json]) -> str:
    """Return a model's size, such as `(18, 256)`; nothing where it has but one."""
    names = MODELS[settings["model"]].sizes if settings["model"] in MODELS else ()
    return "({})".format(", ".join(str(settings[name]) for name in names)) if names else ""


def speed_up_text(result: Result, base: Result | None, quartiles: bool = True) -> str:
    """Write the speed-up over another row; nothing where one of the two was not timed."""
    times = speed_up(result, base)
    if times is None or result is base:
        return "" if times is None else "1"
    return with_quartiles(times, ratio) if quartiles else ratio(times.middle)


def _throughput(result: Result) -> str:
    return with_quartiles(throughput(result)) or outcome(result)


def _busy(result: Result) -> str:
    share = utilization(result)
    return "" if share is None else f"{share:.0%}"


ROW = Column[Result]("row", lambda result: result.row, left=True)
SIZE = Column[Result]("size", lambda result: size(result.config), left=True)
THROUGHPUT = Column("samples/s\n(quartiles)", _throughput)
BUSY = Column("busy", _busy)


def circumstances(rows: Rows) -> str:
    """Say what all rows have in common: scale, model, batch size and steps."""
    first, configs = rows.results[0], [result.config for result in rows]
    steps = [len(result.samples["step_time"]) for result in rows if "step_time" in result.samples]
    sizes = ", ".join(sorted({size(each) for each in configs}))
    parts = [
        f"scale {first.scale}: {first.config['model']}{sizes and f' {sizes}'}, "
        f"input {' x '.join(map(str, first.config['input_shape']))}",
        f"batch size {span([each['batch_size'] for each in configs])}",
        f"{span(steps)} timed step{'' if max(steps) == 1 else 's'} per row" if steps else "no step timed",
    ]
    return "; ".join(parts)


def about_publication(rows: Rows) -> str:
    """Say what the published numbers are, and which of their conditions ours do not share."""
    source, hardware = rows.publication.source or {}, rows.publication.hardware or {}
    papers = [result.config for result in rows.publication.results]
    batches = [each["batch_size"] for each in papers]
    by = source.get("paper") or source.get("repo")
    parts = [f"published: {by}, on {hardware.get('num_gpus')} x {hardware.get('gpu')}"]
    if len(set(batches)) > 1:
        parts.append(
            f"its batch size differs from row to row ({span(batches)}), so its speed-ups mix in larger batches"
        )
    if {each["checkpoint"] for each in papers if each["chunks"] == 1} == {"always"}:
        parts.append("its m=1 rows recompute everything (checkpoint=always), which naive here does not")
    return "; ".join(parts)


def what_busy_is(rows: Rows) -> list[str]:
    """Say what utilization is, where there is any."""
    devices = {result.device for result in rows if utilization(result) is not None}
    return [meaning for device, meaning in WHAT_BUSY_IS.items() if device in devices]


def problems(rows: Rows) -> list[str]:
    """Say why rows have no numbers."""
    failed = {result.row: str(result.reason) for result in rows if result.status == "failed"}
    notes = [
        f"failed: {', '.join(row for row, why in failed.items() if why == reason)}: {reason}"
        for reason in dict.fromkeys(failed.values())
    ]
    lacking = sum(result.status == "needs devices" for result in rows)
    if lacking:
        notes.append(f"{many(lacking, 'row')} not run for want of devices")
    for value in ("utilization_problem", "memory_problem"):
        reasons = dict.fromkeys(str(each.values[value]) for each in rows if value in each.values)
        notes.extend(f"no {value.partition('_')[0]}: {reason}" for reason in reasons)
    return notes
