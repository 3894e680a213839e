"""Collect the numbers of each experiment for the report, and group them by source.

There are four kinds of sources: published, predicted, measured and emulated. All numbers of a
source come from one record (file of results), so that they can be compared. For measured and
emulated numbers, this is the record of a single run of the experiment.

Runs that differ in scale (set of sizes), kind of device, GPU or engine are different sources. The
user's own runs (in the folder `runs`) are separate sources, too. Of several runs that differ in
none of these properties, the report shows only the best one, which the function `ranked` chooses.
A note in the report says that the other runs are left out.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from reproduce.experiments import EXPERIMENTS
from reproduce.numbers.match import grouped
from reproduce.numbers.metrics import Reading, read, speed_up
from reproduce.numbers.sources import Entry
from reproduce.records.places import Json
from reproduce.records.record import SUCCESS, Record, Result, hardware_name, ranked
from reproduce.tables.measured import gpu_names

FOLDERS = ("paper", "predicted", "measured")
Kind = Literal["published", "predicted", "measured", "emulated"]
KINDS: tuple[Kind, ...] = ("published", "predicted", "measured", "emulated")
"""The kinds of source, in the order in which the page shows them."""
RUN = ("measured", "emulated")  # the kinds of source whose tasks were run


@dataclass(frozen=True, eq=False)
class Source:
    """A source of numbers: results of one experiment in one record, obtained in the same way.

    The results have the same scale (set of sizes), device and engine. Either all of them are
    emulated, or none is.

    `label` is a text that distinguishes the source from others, such as `measured (small, CPU)`.
    """

    kind: Kind
    label: str
    record: Record
    results: list[Result]

    @property
    def succeeded(self) -> bool:
        """Return whether at least one result of this source (such as a run) has numbers."""
        return any(result.status in SUCCESS for result in self.results)

    @property
    def gpus(self) -> str:
        """Return the names of the GPUs on which the rows ran, or "" if they ran on no GPU."""
        run = self.record.run
        return gpu_names(run) if run is not None and run.device == "cuda" else ""


@dataclass(frozen=True, eq=False)
class Subject:
    """What a section of the report is about: an experiment or a published table, with its numbers.

    Attributes:
        name: The name of the experiment or table.
        title: The title of the section.
        table: The name of the published table, or "" if there is none.
        sources: The sources of numbers. There is at least one.
        left_out: The measured or emulated sources that the report does not show.
    """

    name: str
    title: str
    table: str
    sources: list[Source]
    left_out: list[Source] = field(default_factory=list)

    @property
    def lead(self) -> Source:
        """Return the source of numbers with which all other sources are compared.

        This is the published table. If there is none, it is the source that has the most rows.
        """
        first = self.sources[0]
        if first.kind == "published":
            return first
        return max(self.sources, key=lambda source: len(source.results))

    @property
    def rows(self) -> dict[str, Mapping[str, Json]]:
        """Return a dictionary from the name of each row to the settings of the row's training.

        If numbers were published, the dictionary has only the published rows. Otherwise, it has the
        rows of all sources, such as predictions and measured runs.
        """
        lead = self.lead
        sources = [lead]
        if lead.kind != "published":
            sources += self.sources
        rows: dict[str, Mapping[str, Json]] = {}
        for source in sources:
            for result in source.results:
                rows.setdefault(result.row, result.config)
        return rows

    @property
    def several_models(self) -> bool:
        """Return whether the rows train several models.

        If they do, each model has a baseline row of its own.
        """
        models = {str(config.get("model")) for config in self.rows.values()}
        return len(models) > 1

    def find(self, source: Source, row: str) -> Entry | None:
        """Return the result that a source (such as a run) has for a row, or None if it has none.

        The result has the same name as the row, or it reproduces the published row of this name.
        """
        link = None if source.kind == "published" else f"{self.table}/{row}"
        for result in source.results:
            if result.row == row or (link and result.published == link):
                return Entry(source.record, result)
        return None

    def readings(self, source: Source, metric: str) -> dict[str, Reading]:
        """Return the values of a metric from one source (such as a run), by the names of the rows.

        Rows without a value are left out. The speed-up of a row is relative to the first row. But
        if the rows train several models, the speed-up is relative to the row's own baseline row.
        """
        entries = {}
        results = {}
        for row in self.rows:
            entry = self.find(source, row)
            if entry is not None:
                entries[row] = entry
                results[row] = entry.result
        first = next(iter(self.rows))
        readings = {}
        for row, entry in entries.items():
            if metric == "speedup":
                base = str(entry.result.over) if self.several_models else first
                reading = speed_up(entry.result, results.get(base))
            else:
                reading = read(entry, metric)
            if reading is None:
                continue
            if metric == "utilization":  # a share of time, which others disturb as they do times
                reading = replace(reading, disturbed=entry.result.disturbed)
            readings[row] = reading
        return readings


def find_subjects(records: Sequence[Record], own: Sequence[Record] = ()) -> list[Subject]:
    """Return the subject of each section of the report, in this order:

    1. the experiments that this program defines, in the order of `EXPERIMENTS`;
    2. other experiments in the records, for example of a newer version of this program;
    3. published tables that no experiment reproduces.

    Args:
        records: Published, predicted and measured records, by default those in `results/`.
        own: The records of the user's own runs, which are in the folder `runs`. The report also
            has their numbers.
    """
    papers: dict[str, Source] = {}
    others = []
    names = dict.fromkeys(EXPERIMENTS)
    for record in [*records, *own]:
        if record.kind == "published":
            papers[record.name] = Source("published", "published", record, record.results)
        else:
            others.append(record)
            for result in record.results:
                names[result.experiment] = None
    owned = {record.name for record in own}
    subjects = []
    rest = dict(papers)
    for name in names:
        shown, left_out = _run(name, others, owned)
        sources = [*_predicted(name, others, owned), *shown]
        table = _table_of(name, sources)
        title = name
        if table in papers:
            sources.append(papers[table])
            title = papers[table].record.title
        if name in EXPERIMENTS:
            title = EXPERIMENTS[name].title
        if sources:
            sources.sort(key=lambda source: KINDS.index(source.kind))
            subjects.append(Subject(name, title, table, sources, left_out))
            rest.pop(table, None)
    for name, paper in rest.items():
        subjects.append(Subject(name, paper.record.title, name, [paper]))
    return subjects


def unpublished(own: Sequence[Record], records: Sequence[Record]) -> list[Record]:
    """Return the records of the user's own runs, without those that are also among `records`.

    If the user has published a run, it is in both `own` and `records`, but is shown only once.
    """
    starts = {record.run.started for record in records if record.run is not None}
    return [record for record in own if record.run is None or record.run.started not in starts]


def _table_of(experiment: str, sources: Sequence[Source]) -> str:
    """Return the name of the published table that an experiment reproduces; "" if there is none."""
    if experiment in EXPERIMENTS:
        return EXPERIMENTS[experiment].table or ""
    for source in sources:
        for result in source.results:
            if result.published:
                return result.published.rpartition("/")[0]
    return ""


def _predicted(
    experiment: str, records: Sequence[Record], owned: Collection[str]
) -> Iterator[Source]:
    for record in records:
        results = []
        where: dict[str, None] = {}
        for result in record.results:
            if result.experiment == experiment:
                results.append(result)
                name = hardware_name(record, result)
                if name:
                    where[name] = None
        if record.kind == "predicted" and results:
            label = _label("predicted", [*where], record.name in owned)
            yield Source("predicted", label, record, results)


def _run(
    experiment: str, records: Sequence[Record], owned: Collection[str]
) -> tuple[list[Source], list[Source]]:
    """Return the measured and emulated sources of an experiment.

    Args:
        experiment: The name of the experiment.
        records: All records that are not published tables.
        owned: The names of the records of the user's own runs.

    Returns:
        - The sources to show, the oldest first.
        - The sources to leave out, because a better run has the same rows on the same kind of
          device, or because none of their rows has a number.
    """
    best: dict[object, Source] = {}
    left_out = []
    measured = [record for record in records if record.kind == "measured"]
    for record in ranked(measured, experiment):
        is_own = record.name in owned
        results = [result for result in record.results if result.experiment == experiment]
        for how, alike in grouped(results, _how).items():
            source = _source(record, alike, is_own)
            key = (is_own, how, source.gpus)
            if key not in best and source.succeeded:
                best[key] = source
            else:
                left_out.append(source)
    return _told_apart(sorted(best.values(), key=_started)), left_out


def _told_apart(sources: Sequence[Source]) -> list[Source]:
    """Return copies of sources of numbers (such as measured runs), with a different label for each.

    If several of the given sources have the same label, the names of their GPUs are added to it.
    """
    count = Counter(source.label for source in sources)
    found = []
    for source in sources:
        if count[source.label] > 1:
            label = source.label.removesuffix(")")
            source = replace(source, label=f"{label}, {source.gpus})")
        found.append(source)
    return found


def _how(result: Result) -> tuple[object, ...]:
    """Return a key that is equal for results that were obtained in the same way.

    The key consists of the scale (set of sizes), the device, whether the result is emulated, and
    the engine. The results of a record that have equal keys are one source of numbers.
    """
    return result.scale, result.device, result.emulated, result.engine


def _source(record: Record, results: list[Result], is_own: bool) -> Source:
    """Make a `Source` from results of a record for which `_how` returns the same key."""
    first = results[0]
    kind: Kind = "emulated" if first.emulated else "measured"
    made: str = kind
    where = [first.scale or ""]
    if first.device == "meta":
        made = "counted"
    elif first.device:
        where.append(first.device.upper())
    if first.engine != "threads":
        where.append(first.engine)
    return Source(kind, _label(made, where, is_own), record, results)


def _label(made: str, where: Sequence[str], is_own: bool) -> str:
    """Return the label of a source of numbers, such as `measured (small, CPU, own)`.

    Args:
        made: How the numbers were made, such as "measured".
        where: The scale, the kind of device and so on. Empty texts are left out.
        is_own: Whether the numbers come from one of the reader's own runs.
    """
    places = list(filter(None, where))
    if is_own:
        places.append("own")
    if not places:
        return made
    return f"{made} ({', '.join(places)})"


def _started(source: Source) -> str:
    run = source.record.run
    return "" if run is None else run.started
