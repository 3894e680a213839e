"""Draw bar charts for the report page: of memory, and of the metrics of an ablation.

In an ablation, the rows (configurations) differ in which components of the pipeline are enabled.
The numbers come from four kinds of sources: published, predicted, measured and emulated. Each
source has its own chart of memory. A chart of an ablation shows the bars of all sources side by
side.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from reproduce.numbers.metrics import BYTES, MARK, Reading, over
from reproduce.report.figure import (
    BACK,
    DEVICES,
    SERIES,
    Legend,
    new_figure,
    set_title,
    styled,
    svg,
)
from reproduce.report.figures import Captioned
from reproduce.report.looks import COLORS, HATCHES
from reproduce.report.subjects import Source, Subject
from torchgpipe.plan.tables import figure as figure_text

KINDS = {"peak_reserved": "reserved", "peak_allocated": "allocated"}
PARTS = {"model_memory": "model", "peak_activation_memory": "activations", "memory": "all devices"}
PALETTE = {f"device {i}": color for i, color in enumerate(DEVICES * 16)}
PALETTE |= zip(PARTS.values(), SERIES[4:], strict=False)
ABLATED = {
    "throughput": "throughput, relative to the first row",
    "utilization": "utilization",
    "reserved": "reserved memory, relative to the first row",
    "memory": "allocated memory, relative to the first row",
}
Readings = dict[str, Reading]
"""Maps the name of a row to the value of a metric in this row."""
Stacks = dict[str, dict[str, float | None]]
"""Maps the name of a row, and then the name of a part of its bar, to bytes (None if unknown)."""


@dataclass(frozen=True)
class Bar:
    """A stacked bar of a chart: the sizes and colours of its parts, and the text at its end."""

    text: str
    parts: list[tuple[float, str]]
    hatch: str | None = None


def memory_figures(subject: Subject) -> Iterator[Captioned]:
    """Yield bar charts of peak memory with their captions, for an experiment or published table.

    There is a chart for each source of numbers, such as a measured run. If a source has numbers of
    both allocated and reserved memory, it has two charts.
    """
    for source in subject.sources:
        for value, kind in KINDS.items():
            stacks = _measured(source, value)
            if stacks:
                name = f"{subject.name}-{source.label}-{kind}"
                stacked = f"Peak of {kind} memory, each device stacked on the one before"
                yield _stacked(name, source, stacks, kind), f"{stacked}; {source.label}."
        if source.kind == "published" and not _ablated(subject):
            stacks = _published(source)
            if stacks:
                caption = (
                    "Reserved memory, summed over devices; published. What each device held was "
                    "not published."
                )
                name = f"{subject.name}-published-memory"
                yield _stacked(name, source, stacks, "reserved"), caption


def ablation_figures(subject: Subject) -> Iterator[Captioned]:
    """Yield a bar chart with a caption for each metric of an ablation.

    In an ablation, the rows (configurations) differ in the enabled components of the pipeline. If
    the experiment is no ablation, there are no charts.
    """
    if not _ablated(subject):
        return
    for metric, meaning in ABLATED.items():
        values = {}
        for source in subject.sources:
            own = _over_first(subject, source, metric)
            if own:
                values[source] = own
        if values:
            what = meaning[0].upper() + meaning[1:]
            caption = f"{what} as components are added one by one."
            if any(_is_disturbed(own) for own in values.values()):
                caption += f" {MARK}: disturbed."
            yield _grouped(f"{subject.name}-{metric}", subject, values, meaning), caption


def _is_disturbed(readings: Readings) -> bool:
    return any(reading.disturbed for reading in readings.values())


def _measured(source: Source, value: str) -> Stacks:
    """Return a dictionary from each row's name to its bar: the peak bytes of each device.

    Args:
        source: The measured, emulated or predicted results.
        value: The kind of memory: `peak_reserved` or `peak_allocated`.
    """
    stacks: Stacks = {}
    for result in source.results:
        peaks = result.values.get(value)
        # Predictions call it "allocated".
        if source.kind == "predicted" and value == "peak_allocated":
            peaks = result.values.get("allocated")
        if isinstance(peaks, list) and peaks:
            stacks.setdefault(result.row, {f"device {i}": x for i, x in enumerate(peaks)})
    return stacks


def _published(source: Source) -> Stacks:
    """Return a dictionary from each row's name to its bar: the published bytes of each part.

    Parts are, for example, the model and the activations. If only some parts of a row were
    published, the others are None. A row of which no part was published is left out.
    """
    units = {}
    for name, unit in source.record.unit.items():
        if name in PARTS and unit in BYTES:
            units[name] = BYTES[unit]
    stacks: Stacks = {}
    for result in source.results:
        parts: dict[str, float | None] = {}
        for name, part in PARTS.items():
            if name in units:
                size = result.values.get(name)
                parts[part] = None if size is None else size * units[name]
        if any(size is not None for size in parts.values()):
            stacks[result.row] = parts
    return stacks


def _ablated(subject: Subject) -> bool:
    """Return whether the rows are an ablation: they differ in the pipeline's enabled components."""
    components = set()
    for config in subject.rows.values():
        if "components" in config:
            components.add(str(config["components"]))
    return len(components) > 1


def _over_first(subject: Subject, source: Source, metric: str) -> Readings:
    """Return a dictionary from rows to their values of a metric, divided by the first row's value.

    Utilization is not divided by the first row's utilization, because it is already a share.
    """
    readings = subject.readings(source, "speedup" if metric == "throughput" else metric)
    first = readings.get(next(iter(subject.rows)))
    values = {}
    for row, reading in readings.items():
        if metric in ("throughput", "utilization"):
            values[row] = reading
        elif first is not None:
            values[row] = over(reading, first)
    return values


@styled
def _stacked(name: str, source: Source, stacks: Stacks, kind: str) -> str:
    most = 0.0
    parts_of: dict[str, None] = {}
    for sizes in stacks.values():
        most = max(most, sum(filter(None, sizes.values())))
        parts_of.update(dict.fromkeys(sizes))
    word = "GiB" if most >= BYTES["GiB"] else "MiB"
    bars = {}
    described = []
    for row, sizes in stacks.items():
        total = 0.0
        parts = []
        said = []
        for what, size in sizes.items():
            if size is None:
                said.append(f"{what} unknown")
            else:
                shown = size / BYTES[word]
                total += shown
                parts.append((shown, PALETTE[what]))
                said.append(f"{what} {figure_text(shown, 3)} {word}")
        text = figure_text(total, 3)
        if len(parts) < len(sizes):
            text += " + ?"
        bars[row] = [Bar(text, parts)]
        described.append(f"{row} {', '.join(said)}")
    keys = [_key(what, PALETTE[what]) for what in parts_of]
    figure = _bars(bars, f"{kind} memory, {word}", keys, columns=4, title=source.label)
    return svg(figure, name, f"{kind} memory, {source.label}: {'; '.join(described)}")


@styled
def _grouped(name: str, subject: Subject, values: Mapping[Source, Readings], meaning: str) -> str:
    bars: dict[str, list[Bar]] = {}
    for row, config in subject.rows.items():
        components = config.get("components")
        label = f"{row}\n+ {components[-1]}" if components else row
        bars[label] = []
        for i, (source, own) in enumerate(values.items()):
            bars[label].append(_bar(source, own.get(row), _hatch(i)))
    keys = []
    described = []
    for i, (source, own) in enumerate(values.items()):
        keys.append(_key(source.label, COLORS[source.kind], _hatch(i)))
        numbers = [f"{row} {_shown(reading)}" for row, reading in own.items()]
        described.append(f"{source.label} {', '.join(numbers)}")
    what, _, how = meaning.partition(", ")
    figure = _bars(bars, how, keys, columns=2, title=what)
    return svg(figure, name, f"{meaning}: {'; '.join(described)}")


def _hatch(place: int) -> str | None:
    """Return the hatch (fill pattern) for the bars of a source of numbers, such as a measured run.

    `place` is the index of the source among all sources of the chart.
    """
    return HATCHES[place % len(HATCHES)]


def _bar(source: Source, reading: Reading | None, hatch: str | None) -> Bar:
    """Return the bar that shows a value, or an empty bar if the value is missing."""
    if reading is None:
        return Bar("", [])
    return Bar(_shown(reading), [(reading.middle, COLORS[source.kind])], hatch)


def _shown(reading: Reading) -> str:
    return f"{reading.middle:.2f}{reading.mark}"


def _key(label: str, color: str, hatch: str | None = None) -> Patch:
    """Return an entry of a legend."""
    return Patch(facecolor=color, edgecolor=BACK, hatch=hatch, label=label)


def _bars(
    rows: Mapping[str, list[Bar]],
    axis: str,
    keys: Sequence[Patch],
    columns: int,
    title: str,
) -> Figure:
    """Draw a chart with horizontal bars and a legend.

    Args:
        rows: Maps the name of each row of the experiment to its bars.
        axis: The label of the horizontal axis.
        keys: The entries of the legend.
        columns: The largest number of columns of the legend.
        title: The title of the chart.
    """
    per_row = max(map(len, rows.values()))
    height = 0.8 / per_row
    legend = Legend([str(key.get_label()) for key in keys], columns)
    room = len(rows) * (0.12 + 0.19 * per_row)
    figure, axes = new_figure(0.95 + room + legend.height)
    axes.grid(axis="x")
    for place, bars in enumerate(rows.values()):
        for i, bar in enumerate(bars):
            at = place - 0.4 + height * (i + 0.5)
            _draw_bar(axes, bar, at, height)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.margins(x=0.14)
    axes.set_xlabel(axis)
    set_title(axes, title)
    legend.add(figure, keys)
    return figure


def _draw_bar(axes: Axes, bar: Bar, at: float, height: float) -> None:
    """Draw a stacked bar at the height `at` of the vertical axis, and the text at the bar's end."""
    end = 0.0
    for size, color in bar.parts:
        axes.barh(
            at,
            size,
            height,
            end,
            color=color,
            edgecolor=BACK,
            hatch=bar.hatch,
            linewidth=0.7,
        )
        end += size
    axes.annotate(bar.text, (end, at), (3, 0), textcoords="offset points", va="center")
