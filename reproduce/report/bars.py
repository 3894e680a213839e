"""Draw bars: memory of each device stacked to its sum, and what each component of the ablation adds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from reproduce.numbers.metrics import BYTES, over
from reproduce.report.curves import COLORS
from reproduce.report.figure import BACK, DEVICES, SERIES, new_figure, styled, svg
from reproduce.report.subjects import Source, Subject

KINDS = {"peak_reserved": "reserved", "peak_allocated": "allocated"}
PARTS = {"model_memory": "model", "peak_activation_memory": "activations", "memory": "all devices"}
PALETTE = {
    **{f"device {i}": color for i, color in enumerate(DEVICES * 16)},
    **dict(zip(PARTS.values(), SERIES[4:], strict=False)),
}
ABLATED = {
    "throughput": "throughput over the first row's",
    "utilization": "utilization",
    "reserved": "reserved memory over the first row's",
    "memory": "allocated memory over the first row's",
}
Stacks = dict[str, dict[str, float | None]]  # row -> what holds how many bytes; None: nobody knows


@dataclass(frozen=True)
class Bar:
    """Hold a bar's parts, sizes with their colours, and the text at its end."""

    text: str
    parts: list[tuple[float, str]]
    hatch: str | None = None


def memory_figures(subject: Subject) -> Iterator[tuple[str, str]]:
    """Yield a figure for each source and kind of bytes, with its caption."""
    for source in subject.sources:
        for value, kind in KINDS.items():
            stacks: Stacks = {
                result.row: {f"device {i}": peak for i, peak in enumerate(peaks)}
                for result in source.results
                if isinstance(peaks := result.values.get(value), list) and peaks
            }
            if stacks:
                caption = f"Peak of {kind} memory, each device stacked on the one before; {source.label}."
                yield _stacked(f"{subject.name}-{source.label}-{kind}", source, stacks, kind), caption
        if source.kind == "published" and not _ablated(subject) and (stacks := _published(source)):
            caption = "Reserved memory, summed over devices; published. What each device held was not published."
            yield _stacked(f"{subject.name}-published-memory", source, stacks, "reserved"), caption


def ablation_figures(subject: Subject) -> Iterator[tuple[str, str]]:
    """Yield a figure for each metric, with its caption, where the rows differ in the components that they have."""
    for metric, meaning in ABLATED.items() if _ablated(subject) else ():
        values = {source: _over_first(subject, source, metric) for source in subject.sources}
        values = {source: own for source, own in values.items() if own}
        if values:
            caption = f"{meaning[0].upper()}{meaning[1:]} as components are added one by one."
            yield _grouped(f"{subject.name}-{metric}", subject, values, meaning), caption


def _published(source: Source) -> Stacks:
    """Stack what was published of a row; what ran out of memory has no size."""
    units = {name: BYTES[unit] for name, unit in source.record.unit.items() if name in PARTS and unit in BYTES}
    stacks: Stacks = {}
    for result in source.results:
        sizes = {name: result.values.get(name) for name in PARTS if name in units}
        if any(size is not None for size in sizes.values()):
            stacks[result.row] = {PARTS[x]: None if size is None else size * units[x] for x, size in sizes.items()}
    return stacks


def _ablated(subject: Subject) -> bool:
    """Say whether the rows differ in the components that they have."""
    return len({str(config["components"]) for config in subject.rows.values() if "components" in config}) > 1


def _over_first(subject: Subject, source: Source, metric: str) -> dict[str, float]:
    readings = subject.readings(source, "speedup" if metric == "throughput" else metric)
    first = readings.get(next(iter(subject.rows)))
    if metric not in ("throughput", "utilization"):
        readings = {row: over(reading, first) for row, reading in readings.items() if first}
    return {row: reading.middle for row, reading in readings.items()}


@styled
def _stacked(name: str, source: Source, stacks: Stacks, kind: str) -> str:
    most = max(sum(filter(None, sizes.values())) for sizes in stacks.values())
    word = "GiB" if most >= BYTES["GiB"] else "MiB"
    bars, described = {}, []
    for row, sizes in stacks.items():
        known = {what: size / BYTES[word] for what, size in sizes.items() if size is not None}
        text = f"{sum(known.values()):.3g}" + ("" if len(known) == len(sizes) else " + ?")
        bars[row] = [Bar(text, [(size, PALETTE[what]) for what, size in known.items()])]
        each = (f"{what} {known[what]:.3g} {word}" if what in known else f"{what} unknown" for what in sizes)
        described.append(f"{row} {', '.join(each)}")
    labels = {what: PALETTE[what] for sizes in stacks.values() for what in sizes}
    figure = _bars(bars, f"{word}, {kind}", labels, columns=4, title=source.label)
    return svg(figure, name, f"{kind} memory, {source.label}: {'; '.join(described)}")


@styled
def _grouped(name: str, subject: Subject, values: Mapping[Source, Mapping[str, float]], meaning: str) -> str:
    bars = {}
    for row, config in subject.rows.items():
        components = config.get("components")
        bars[f"{row}\n+ {components[-1]}" if components else row] = [
            Bar(f"{own[row]:.2f}", [(own[row], COLORS[source.kind])], "///" if source.kind == "predicted" else None)
            if row in own
            else Bar("", [])
            for source, own in values.items()
        ]
    figure = _bars(bars, meaning, {source.label: COLORS[source.kind] for source in values}, columns=2)
    described = (
        f"{source.label} {', '.join(f'{row} {value:.2f}' for row, value in own.items())}"
        for source, own in values.items()
    )
    return svg(figure, name, f"{meaning}: {'; '.join(described)}")


def _bars(
    rows: Mapping[str, Sequence[Bar]], axis: str, labels: Mapping[str, str], columns: int, title: str = ""
) -> Figure:
    """Draw as many bars on each row, and a legend of colours by their labels."""
    per_row = max(map(len, rows.values()))
    height = 0.8 / per_row
    figure, axes = new_figure(0.95 + len(rows) * (0.12 + 0.19 * per_row) + 0.17 * -(-len(labels) // columns))
    axes.grid(axis="x")
    for place, bars in enumerate(rows.values()):
        for i, bar in enumerate(bars):
            at, end = place - 0.4 + height * (i + 0.5), 0.0
            for size, color in bar.parts:
                axes.barh(at, size, height, end, color=color, edgecolor=BACK, hatch=bar.hatch, linewidth=0.7)
                end += size
            axes.annotate(bar.text, (end, at), (3, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.margins(x=0.14)
    axes.set_xlabel(axis)
    axes.set_title(title)
    figure.legend(
        handles=[Patch(color=color, label=label) for label, color in labels.items()],
        loc="outside lower center", ncols=min(columns, len(labels)), handlelength=1, columnspacing=1,
    )  # fmt: skip
    return figure
