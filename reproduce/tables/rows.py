"""Hold what several tables of an experiment share: rows, columns and notes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

from reproduce.experiments.row import AS_PUBLISHED, LIKE_PUBLISHED, PUBLISHED_BALANCE, Experiment
from reproduce.machine.load import LIMITS
from reproduce.models.built import MODELS
from reproduce.numbers.metrics import (
    Reading,
    outcome,
    over_measured,
    speed_up,
    throughput,
    utilization,
)
from reproduce.records.places import Json
from reproduce.records.published import published
from reproduce.records.record import Record, Result
from reproduce.tables.layout import (
    Column,
    Form,
    Table,
    by_value,
    many,
    number,
    ratio,
    span,
    table,
    with_quartiles,
)

WHAT_BUSY_IS = {
    "cpu": "busy: share of a step's time in which the device was in a task",
    "cuda": "busy: GPU utilization as the driver (NVML) reports it, mean over some steps",
}


def is_published(result: Result) -> bool:
    """Say whether a row repeats a published one, with the published or a smaller model."""
    return result.config["configuration"] in (AS_PUBLISHED, LIKE_PUBLISHED, PUBLISHED_BALANCE)


def speed(result: Result) -> Reading | str:
    """Return samples per second, or why the row has none."""
    return throughput(result) or outcome(result)


def size(settings: Mapping[str, Json]) -> str:
    """Return a model's size, such as `(18, 256)`; empty if the model has no sizes to choose."""
    names = MODELS[settings["model"]].sizes if settings["model"] in MODELS else ()
    return "({})".format(", ".join(str(settings[name]) for name in names)) if names else ""


def config(heading: str, name: str) -> Column[Result]:
    """Return the column of a configuration field, with a dash for None."""
    return Column(heading, lambda result: result.config[name], nothing="-")


def by_row(
    heading: str, values: Mapping[str, object], form: Form, nothing: str = ""
) -> Column[Result]:
    """Return the column of values that are given by the row's name."""
    return Column(heading, lambda result: values.get(result.row), form, nothing)


ROW = Column[Result]("row", lambda result: result.row, left=True)
SIZE = Column[Result]("size", lambda result: size(result.config), left=True)
BUSY = Column("busy", utilization, "{:.0%}")


class Rows:
    """Hold the rows of a table, and make its columns and notes.

    If `every` has emulated results, the rows are these, and measured results are extra columns beside them.
    """

    def __init__(self, experiment: Experiment, every: Sequence[Result]) -> None:
        self.experiment = experiment
        self.every = every
        self.emulated = any(result.emulated for result in every)
        self.results = [result for result in every if result.emulated == self.emulated]
        self._beside = [result for result in every if result.emulated != self.emulated]

    def __iter__(self) -> Iterator[Result]:
        return iter(self.results)

    def table(
        self, subtitle: str, columns: Iterable[Column[Result]], notes: Iterable[str | None]
    ) -> Table:
        """Make the table. Its title is the experiment's title and `subtitle`."""
        return table(self.experiment.title + subtitle, columns, self, notes)

    def named(self, row: str | None) -> Result | None:
        """Return the row of that name; None if it is not in the table."""
        return next((result for result in self if result.row == row), None)

    def measured(self, row: str | None) -> Result | None:
        """Return the measured result of an emulated row, if any."""
        return next((result for result in self._beside if result.row == row), None)

    def paper(self, result: Result | None) -> Result | None:
        """Return the published row that a row reproduces; None if there is none."""
        link = None if result is None else result.published
        papers = self.publication.results if link else ()
        return next(
            (paper for paper in papers if f"{self.experiment.table}/{paper.row}" == link), None
        )

    def speed_up(self, result: Result) -> Reading | str | None:
        """Return the speed-up over the row's baseline; None if one of the two was not timed."""
        times = speed_up(result, self.named(result.over))
        return "1" if times and result.row == result.over else times

    def measured_speed_up(self, result: Result) -> Reading | None:
        """Return the measured speed-up of an emulated row, if any."""
        return speed_up(self.measured(result.row), self.measured(result.over))

    def published_speed_up(self, result: Result) -> Reading | None:
        """Return the published speed-up: of the row that this one reproduces, over that of its baseline."""
        return speed_up(self.paper(result), self.paper(self.named(result.over)))

    def published_throughput(self, result: Result) -> Reading | None:
        """Return the published samples per second at scale paper; None at other scales, which do other work."""
        paper = self.paper(result) if result.scale == "paper" else None
        return None if paper is None else throughput(paper)

    def throughput(self) -> Column[Result]:
        """Return the column of samples per second, or why a row has none."""
        if self.emulated:
            return Column("samples/s\nemulated", speed, number)
        return Column("samples/s\n(quartiles)", speed, with_quartiles)

    def over(self, heading: str, quartiles: bool = False) -> Column[Result]:
        """Return the column of speed-ups."""
        return Column(
            heading, self.speed_up, partial(with_quartiles, write=ratio) if quartiles else ratio
        )

    def beside(self) -> list[Column[Result]]:
        """Return the columns of measured speed-ups, and of emulated divided by measured samples/s."""
        return [
            Column("measured", self.measured_speed_up, ratio),
            Column(
                "emul./\nmeas.", lambda each: over_measured(each, self.measured(each.row)), ratio
            ),
        ]

    def published(self, heading: str, value: str, form: str, unit: float = 1) -> Column[Result]:
        """Return the column of a published value."""

        def cell(result: Result) -> object:
            paper = self.paper(result)
            found: Json = "" if paper is None else paper.values.get(value, "")
            return "out of memory" if found is None else found and found / unit

        return Column(heading, cell, form)

    @property
    def publication(self) -> Record:
        """Give the published table that the rows reproduce."""
        assert self.experiment.table is not None
        return published(self.experiment.table)

    @property
    def published_on(self) -> str:
        """Give the devices of the published table."""
        hardware = self.publication.hardware or {}
        return f"{hardware.get('num_gpus')} x {hardware.get('gpu')}"

    @property
    def published_title(self) -> str:
        """Give the title of rows that repeat published ones."""
        exact = all(result.config["configuration"] == AS_PUBLISHED for result in self)
        return ", as published" if exact else ", like the published rows"

    def about_emulation(self, ratio: bool = True) -> Iterator[str]:
        """Explain emulated numbers, if there are any, and their `ratio` to measured ones, if it is shown."""
        if not self.emulated:
            return
        counts = [result.values["executed"] for result in self if "executed" in result.values]
        most = (
            f", at most {max(counts)} micro-batches of a step" if counts and max(counts) > 1 else ""
        )
        yield (
            f"emulated: every task run by itself on one device{most}, and the schedule of n devices replayed over "
            "their times"
        )
        both = any(over_measured(each, self.measured(each.row)) for each in self)
        if both:
            yield (
                "measured: the speed-up of n devices at once, by the clock"
                + "; emul./meas.: of samples/s" * ratio
            )
        links = dict.fromkeys(str(each.config["link"]) for each in self if each.config.get("link"))
        if links:
            here = "; emul./meas. is of devices like these" if both and ratio else ""
            yield f"emulated copies: as on {'; '.join(links)}, and recomputation starts early as there{here}"
        elif any(each.device == "cuda" for each in self):
            yield "emulated copies take no time: the links of these GPUs are not known; --link can name a description"

    def circumstances(self) -> str:
        """Say what the rows have in common: scale, model (if there is only one), batch sizes and steps."""
        first, configs = self.results[0], [result.config for result in self]
        steps = [
            len(result.samples["step_time"]) for result in self if "step_time" in result.samples
        ]
        sizes = ", ".join(sorted({size(each) for each in configs}))
        several = len({each["model"] for each in configs}) > 1
        model = "" if several else f"{first.config['model']}{sizes and f' {sizes}'}, "
        parts = [
            f"scale {first.scale}: {model}input {' x '.join(map(str, first.config['input_shape']))}",
            f"batch size {span([each['batch_size'] for each in configs])}",
            f"{span(steps)} step{'' if max(steps) == 1 else 's'} per row"
            if steps
            else "no step timed",
        ]
        if again := max((result.values.get("disturbed_rounds", 0) for result in self), default=0):
            parts.append(f"{many(again, 'disturbed round')} left out")
        if steps and all(LIMITS.keys().isdisjoint(result.samples) for result in self):
            parts.append("whether others disturbed them is not known")
        return "; ".join(parts)

    def about_publication(self) -> str:
        """Say where the published numbers come from, and how their conditions differ from ours."""
        source = self.publication.source or {}
        papers = [result.config for result in self.publication.results]
        batches = [each["batch_size"] for each in papers]
        about = f"published: {source.get('paper') or source.get('repo')}, on {self.published_on}"
        if len(set(batches)) > 1:
            about += f"; its batch size differs from row to row ({span(batches)}), so its speed-ups mix in larger batches"
        if {each["checkpoint"] for each in papers if each["chunks"] == 1} == {"always"}:
            about += (
                "; its m=1 rows recompute everything (checkpoint=always), which naive here does not"
            )
        return about

    def what_busy_is(self) -> list[str]:
        """Say what utilization means, if there is any."""
        devices = {result.device for result in self if utilization(result) is not None}
        return [meaning for device, meaning in WHAT_BUSY_IS.items() if device in devices]

    def problems(self) -> Iterator[str]:
        """Say why rows have no numbers."""
        bad = ("failed", "out of memory") if self.emulated else ("failed",)
        failed = {each.row: str(each.reason) for each in self if each.status in bad}
        left_out = {
            each.row: str(each.reason)
            for each in self.every
            if each.status == "not run" and each.reason
        }
        yield from (f"failed: {names}: {reason}" for reason, names in by_value(failed).items())
        yield from (f"{names}: {reason}" for reason, names in by_value(left_out).items())
        if lacking := sum(each.status == "needs devices" for each in self.every):
            yield f"{many(lacking, 'row')} not run for want of devices"
        for what in ("utilization", "memory"):
            reasons = dict.fromkeys(
                str(problem) for each in self if (problem := each.values.get(f"{what}_problem"))
            )
            yield from (f"no {what}: {reason}" for reason in reasons)
