"""Define rows, columns and notes that several kinds of tables of an experiment use."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

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

EMULATED = "emulated"
WHAT_BUSY_IS = {
    "cpu": "busy: share of a step's time in which the device was in a task",
    "cuda": "busy: GPU utilization as the driver (NVML) reports it, mean over some steps",
    EMULATED: "busy, emulated: share of the emulated step in which the device was in a task; this "
    "step ends before the optimizer's update",
}
Cells = Column[Result]
Config = Mapping[str, Json]


def is_published(result: Result) -> bool:
    """Return whether a row (configuration) repeats a published row, maybe with a smaller model."""
    return result.config["configuration"] in (AS_PUBLISHED, LIKE_PUBLISHED, PUBLISHED_BALANCE)


def speed(result: Result) -> Reading | str:
    """Return the samples per second of a row, or a text that says why they are not known."""
    return throughput(result) or outcome(result)


def size(settings: Config) -> str:
    """Return a model's sizes as a text, such as `(18, 256)`, or "" if it has none to choose."""
    model = MODELS.get(settings["model"])
    if model is None or not model.sizes:
        return ""
    sizes = ", ".join(str(settings[name]) for name in model.sizes)
    return f"({sizes})"


def config(heading: str, name: str) -> Cells:
    """Return a column that shows the setting `name` of each row (configuration), or a dash."""
    return Column(heading, lambda result: result.config[name], nothing="-")


def by_row(heading: str, values: Mapping[str, object], form: Form, nothing: str = "") -> Cells:
    """Return a column that shows `values`, a dictionary with the name of each row as a key."""
    return Column(heading, lambda result: values.get(result.row), form, nothing)


ROW = Column[Result]("row", lambda result: result.row, left=True)
SIZE = Column[Result]("size", lambda result: size(result.config), left=True)
BUSY = Column("busy", utilization, "{:.0%}")


class Rows:
    """The rows of a table, with methods that make the columns and the notes of the table.

    If no result in `every` is emulated, each result is a row. Otherwise, only the emulated results
    are rows, and the measured results are shown beside them in additional columns.
    """

    def __init__(self, experiment: Experiment, every: Sequence[Result]) -> None:
        self.experiment = experiment
        self.every = every
        self.emulated = any(result.emulated for result in every)
        self.results: list[Result] = []
        self._beside: list[Result] = []
        for result in every:
            if result.emulated == self.emulated:
                self.results.append(result)
            else:
                self._beside.append(result)

    def __iter__(self) -> Iterator[Result]:
        return iter(self.results)

    @property
    def configs(self) -> list[Config]:
        """Return the configurations of the rows."""
        return [result.config for result in self.results]

    def span(self, name: str) -> str:
        """Return the range of a field in the rows' configurations as a text, such as `8 to 64`."""
        return span([config[name] for config in self.configs])

    def table(self, subtitle: str, columns: Iterable[Cells], notes: Iterable[str | None]) -> Table:
        """Make a table of these rows. Its title is the experiment's title and then `subtitle`."""
        return table(self.experiment.title + subtitle, columns, self, notes)

    def named(self, row: str | None) -> Result | None:
        """Return the result of the row with this name, or None if the table has no such row."""
        return _named(self.results, row)

    def measured(self, row: str | None) -> Result | None:
        """Return the measured result of an emulated row, or None if the row was only emulated."""
        return _named(self._beside, row)

    def paper(self, result: Result | None) -> Result | None:
        """Return the published row that a row reproduces, or None if it reproduces none."""
        link = None if result is None else result.published
        if not link:
            return None
        for paper in self.publication.results:
            if f"{self.experiment.table}/{paper.row}" == link:
                return paper
        return None

    def speed_up(self, result: Result) -> Reading | str | None:
        """Return the speed-up of a row over its baseline row; None if either was not timed."""
        times = speed_up(result, self.named(result.over))
        if times and result.row == result.over:
            return "1"
        return times

    def measured_speed_up(self, result: Result) -> Reading | None:
        """Return the measured speed-up over the baseline row; None if either was not measured."""
        return speed_up(self.measured(result.row), self.measured(result.over))

    def published_speed_up(self, result: Result) -> Reading | None:
        """Return the published speed-up of the row that this row reproduces, or None."""
        base = self.named(result.over)
        return speed_up(self.paper(result), self.paper(base))

    def published_throughput(self, result: Result) -> Reading | None:
        """Return the published samples per second of the row that this row reproduces, or None.

        The result is None if this row is smaller (its scale is not `paper`): it does other work.
        """
        paper = self.paper(result) if result.scale == "paper" else None
        return None if paper is None else throughput(paper)

    def throughput(self) -> Cells:
        """Return the column of samples per second. If a row has no number, its cell says why."""
        if self.emulated:
            return Column("samples/s\nemulated", speed, number)
        return Column("samples/s\n(quartiles)", speed, with_quartiles)

    def over(self, heading: str, quartiles: bool = False) -> Cells:
        """Return the column of speed-ups. Its heading says if they are emulated speed-ups."""
        lines = [heading, "emulated" if self.emulated else "", "(quartiles)" if quartiles else ""]
        form = _ratio_with_quartiles if quartiles else ratio
        return Column("\n".join(filter(None, lines)), self.speed_up, form)

    def emulated_over_measured(self, result: Result) -> Reading | None:
        """Return (emulated samples/s) / (measured samples/s) of a row, or None if not known."""
        return over_measured(result, self.measured(result.row))

    def published(self, heading: str, value: str, form: str, unit: float = 1) -> Cells:
        """Return the column of the published value named `value` of each row, divided by `unit`."""

        def cell(result: Result) -> object:
            paper = self.paper(result)
            found: Json = "" if paper is None else paper.values.get(value, "")
            if found is None:
                return "out of memory"
            return found / unit if found else found

        return Column(heading, cell, form)

    @property
    def publication(self) -> Record:
        """Return the published table that the rows reproduce, as a record of results."""
        assert self.experiment.table is not None
        return published(self.experiment.table)

    @property
    def published_on(self) -> str:
        """Return the GPUs of the paper's table as text, such as `8 x Tesla P40`."""
        hardware = self.publication.hardware or {}
        return f"{hardware.get('num_gpus')} x {hardware.get('gpu')}"

    @property
    def published_title(self) -> str:
        """Return the end of the table's title, such as ", as published" or ", changed rows"."""
        if any("changed_from" in config for config in self.configs):
            return ", changed rows"
        exact = all(config["configuration"] == AS_PUBLISHED for config in self.configs)
        return ", as published" if exact else ", like the published rows"

    def about_emulation(self, ratio: bool = True) -> Iterator[str]:
        """Yield notes that explain the emulated numbers of the table, if it has any.

        Set `ratio` if the table has the column (emulated samples/s) / (measured samples/s).
        """
        if not self.emulated:
            return
        most = max(result.values.get("executed", 0) for result in self)
        limit = f" (of at most {most} micro-batches of a step)" if most > 1 else ""
        both = any(self.emulated_over_measured(result) for result in self)
        measured = "The measured speed-up is that of n devices that really ran at the same time."
        if both and ratio:
            yield (
                f"{measured} emul./meas. is the emulated divided by the measured samples/s, as the "
                "median of the ratios of all rounds."
            )
            beside = [found for found in self._beside if self.named(found.row)]
            yield f"samples/s measured: {_speeds(beside)}"
        elif both:
            yield measured
        not_emulated = _speeds([found for found in self._beside if not self.named(found.row)])
        if not_emulated:
            yield f"samples/s of rows that were measured, but not emulated: {not_emulated}"
        yield (
            f"For the emulated numbers, every task{limit} ran by itself on one device. Then the "
            "schedule of n devices was simulated with the times of the tasks."
        )
        links: dict[str, None] = {}
        devices = set()
        for result in self:
            devices.add(result.device)
            link = result.config.get("link")
            if link:
                links[str(link)] = None
        if links:
            copies = f"Emulated copies take as long as on the hardware {'; '.join(links)}. "
            copies += "A recomputation starts before its gradient arrives."
            if both and ratio:
                copies += " In emul./meas., both are as on the devices that were measured."
            yield copies
        elif "cuda" in devices:
            yield (
                "emulated copies take no time: the links of these GPUs are not known; --link can "
                "name a description"
            )

    def circumstances(self) -> str:
        """Return a note that says how the rows ran: scale, model, batch sizes, number of steps."""
        first = self.results[0]
        shape = " x ".join(map(str, first.config["input_shape"]))
        models = set()
        sizes = set()
        for config in self.configs:
            models.add(config["model"])
            sizes.add(size(config))
        model = ""
        if len(models) == 1:
            words = [first.config["model"], ", ".join(sorted(sizes))]
            model = " ".join(filter(None, words)) + ", "
        parts = [
            f"scale {first.scale}: {model}input {shape}",
            f"batch size {self.span('batch_size')}",
        ]
        steps = []
        again: dict[str | None, int] = {}  # the rounds of each group of rows that were left out
        known = False
        for result in self.every:
            if "step_time" in result.samples:
                steps.append(len(result.samples["step_time"]))
            left_out = result.values.get("disturbed_rounds", 0)
            if left_out:
                group = result.config.get("group")
                again[group] = max(again.get(group, 0), left_out)
            if not LIMITS.keys().isdisjoint(result.samples):
                known = True
        if steps:
            plural = "" if max(steps) == 1 else "s"
            parts.append(f"{span(steps)} step{plural} per row")
        else:
            parts.append("no step timed")
        if again:
            parts.append(f"{many(sum(again.values()), 'disturbed round')} left out")
        if steps and not known:
            parts.append("it is not known whether other programs disturbed these steps")
        return "; ".join(parts)

    def about_publication(self) -> str:
        """Return a note about the published numbers: their source, hardware and peculiarities."""
        source = self.publication.source or {}
        place = source.get("paper") or source.get("repo")
        about = f"published: {place}, on {self.published_on}"
        batches = []
        modes = set()  # of rows with a single micro-batch
        for paper in self.publication.results:
            batches.append(paper.config["batch_size"])
            if paper.config["chunks"] == 1:
                modes.add(paper.config["checkpoint"])
        if len(set(batches)) > 1:
            about += f"; its batch size differs from row to row ({span(batches)}), so its "
            about += "speed-ups mix in larger batches"
        if modes == {"always"}:
            about += "; its m=1 rows recompute everything (checkpoint=always), which naive here "
            about += "does not"
        return about

    def what_busy_is(self) -> list[str]:
        """Return notes that say what the column `busy` (utilization) means, if it has a number."""
        devices = set()
        for result in self:
            if utilization(result) is not None:
                devices.add(EMULATED if result.emulated else result.device)
        return [meaning for device, meaning in WHAT_BUSY_IS.items() if device in devices]

    def problems(self) -> Iterator[str]:
        """Yield notes that say why rows have no numbers, or no utilization or memory."""
        bad = ("failed", "out of memory") if self.emulated else ("failed",)
        failed = {}
        for result in self:
            if result.status in bad:
                failed[result.row] = str(result.reason)
        left_out = {}
        lacking = 0
        for result in self.every:
            if result.status == "not run" and result.reason:
                left_out[result.row] = result.reason
            if result.status == "needs devices":
                lacking += 1
        for reason, names in by_value(failed).items():
            yield f"failed: {names}: {reason}"
        for reason, names in by_value(left_out).items():
            yield f"{names}: {reason}"
        if lacking:
            yield f"{many(lacking, 'row')} not run for want of devices"
        yield from self._not_measured("utilization")
        yield from self._not_measured("memory")

    def _not_measured(self, what: str) -> Iterator[str]:
        reasons: dict[str, None] = {}
        for result in self:
            reason = result.values.get(f"{what}_problem")
            if reason:
                reasons[str(reason)] = None
        for text in reasons:
            yield f"no {what}: {text}"


def _named(results: Iterable[Result], row: str | None) -> Result | None:
    for result in results:
        if result.row == row:
            return result
    return None


def _speeds(results: Iterable[Result]) -> str:
    """Return a text like `n2m4 21.3, n4m8 12.3`: the samples/s of each row that was timed."""
    found = []
    for result in results:
        reading = throughput(result)
        if reading:
            found.append(f"{result.row} {number(reading)}")
    return ", ".join(found)


def _ratio_with_quartiles(reading: Reading) -> str:
    return with_quartiles(reading, ratio)
