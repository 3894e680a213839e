"""Draw bars: memory of each device stacked to its sum, and what each component of the ablation adds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.patches import Patch

from reproduce.numbers.metrics import BYTES, over
from reproduce.records.decode import Json
from reproduce.report.curves import COLORS
from reproduce.report.figure import BACK, DEVICES, SERIES, new_figure, styled, svg
from reproduce.report.subjects import Source, Subject

KINDS = {"peak_reserved": "reserved", "peak_allocated": "allocated"}
PARTS = {"model_memory": "model", "peak_activation_memory": "activations", "memory": "all devices"}
Stacks = dict[str, list[tuple[str, float, str]]]  # row -> what, how many bytes, colour
GiB, MiB = BYTES["GiB"], BYTES["MiB"]


def memory_figures(subject: Subject) -> list[tuple[str, str]]:
    """Return a figure for each source and kind of bytes, with its caption."""
    figures = []
    for source in subject.sources:
        for kind, name in KINDS.items():
            stacks = _by_device(source, kind)
            if stacks:
                caption = f"Peak of {name} memory, each device stacked on the one before; {source.label}."
                figures.append((_stacked(f"{subject.name}-{source.label}-{name}", source, stacks, name), caption))
        if source.kind == "published" and not _ablated(subject) and (stacks := _published(source)):
            caption = "Reserved memory, summed over devices; published. What each device held was not published."
            figures.append((_stacked(f"{subject.name}-published-memory", source, stacks, "reserved"), caption))
    return figures


def _by_device(source: Source, kind: str) -> Stacks:
    stacks: Stacks = {}
    for result in source.results:
        peaks = result.values.get(kind)
        if isinstance(peaks, list) and peaks:
            stacks[result.row] = [(f"device {i}", peak, DEVICES[i % len(DEVICES)]) for i, peak in enumerate(peaks)]
    return stacks


def _published(source: Source) -> Stacks:
    """Stack what was published of a row; what ran out of memory has no size, which is NaN here."""
    unit = source.record.unit
    names = [name for name in PARTS if unit.get(name) in BYTES]
    stacks: Stacks = {}
    for result in source.results:
        sizes = {name: result.values.get(name) for name in names}
        if any(size is not None for size in sizes.values()):
            stacks[result.row] = [
                (
                    PARTS[name],
                    math.nan if size is None else size * BYTES[unit[name]],
                    SERIES[3 + list(PARTS).index(name)],
                )
                for name, size in sizes.items()
            ]
    return stacks


def _stacked(name: str, source: Source, stacks: Stacks, kind: str) -> str:
    most = max(sum(size for _, size, _ in parts if math.isfinite(size)) for parts in stacks.values())
    unit, word = (GiB, "GiB") if most >= GiB else (MiB, "MiB")
    labels = {label: color for parts in stacks.values() for label, _, color in parts}
    figure = new_figure(0.95 + 0.27 * len(stacks) + 0.17 * ((len(labels) + 2) // 3))
    with styled():
        axes = figure.add_subplot()
        axes.grid(axis="x")
        for place, parts in enumerate(stacks.values()):
            left = 0.0
            for _, size, color in parts:
                if not math.isfinite(size):
                    continue
                axes.barh(place, size / unit, left=left, color=color, edgecolor=BACK, linewidth=0.7, height=0.72)
                left += size / unit
            known = all(math.isfinite(size) for _, size, _ in parts)
            axes.annotate(
                f"{left:.3g}" if known else f"{left:.3g} + ?",
                (left, place),
                (3, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
        axes.set_yticks(range(len(stacks)), list(stacks))
        axes.invert_yaxis()
        axes.set_xlim(0, most / unit * 1.14)
        axes.set_xlabel(f"{word}, {kind}")
        axes.set_title(source.label, loc="left", fontweight="bold")
        figure.legend(
            handles=[Patch(color=color, label=label) for label, color in labels.items()],
            loc="outside lower center", ncols=min(4, len(labels)), handlelength=1, columnspacing=1,
        )  # fmt: skip
    described = f"{kind} memory, {source.label}: " + "; ".join(
        f"{row} " + ", ".join(f"{label} {size / unit:.3g} {word}" for label, size, _ in parts)
        for row, parts in stacks.items()
    ).replace(f"nan {word}", "unknown")
    return svg(figure, _name(name), described)


# --- ablation --------------------------------------------------------------------------------------------------------

ABLATED = {
    "throughput": "throughput over the first row's",
    "utilization": "utilization",
    "reserved": "reserved memory over the first row's",
    "memory": "allocated memory over the first row's",
}


def ablation_figures(subject: Subject) -> list[tuple[str, str]]:
    """Return a figure for each metric, with its caption, where the rows differ in the components that they have."""
    rows = subject.rows
    if not _ablated(subject):
        return []
    figures = []
    for metric, said in ABLATED.items():
        shown = {source: _over_first(subject, source, metric) for source in subject.sources}
        shown = {source: values for source, values in shown.items() if values}
        if shown:
            figure = _grouped(f"{subject.name}-{metric}", rows, shown, said)
            figures.append((figure, f"{said[0].upper()}{said[1:]} as components are added one by one."))
    return figures


def _ablated(subject: Subject) -> bool:
    """Say whether the rows differ in the components that they have."""
    return len({str(config.get("components")) for config in subject.rows.values()}) > 1


def _over_first(subject: Subject, source: Source, metric: str) -> dict[str, float]:
    first = next(iter(subject.rows))
    name = "speedup" if metric == "throughput" else metric
    readings = {row: source.read(row, first, subject.table, name) for row in subject.rows}
    known = {row: reading for row, reading in readings.items() if reading is not None}
    if metric in ("throughput", "utilization"):
        return {row: reading.middle for row, reading in known.items()}
    return {row: over(reading, known[first]).middle for row, reading in known.items()} if first in known else {}


def _grouped(
    name: str, rows: Mapping[str, Mapping[str, object]], shown: Mapping[Source, Mapping[str, float]], said: str
) -> str:
    height = 0.8 / len(shown)
    figure = new_figure(0.8 + len(rows) * (0.15 + 0.19 * len(shown)))
    with styled():
        axes = figure.add_subplot()
        axes.grid(axis="x")
        for i, (source, values) in enumerate(shown.items()):
            for place, row in enumerate(rows):
                if row in values:
                    at = place - 0.4 + height * (i + 0.5)
                    hatch = "///" if source.kind == "predicted" else None
                    axes.barh(at, values[row], height=height, color=COLORS[source.kind], edgecolor=BACK, hatch=hatch,
                              linewidth=0.7)  # fmt: skip
                    axes.annotate(f"{values[row]:.2f}", (values[row], at), (3, 0), textcoords="offset points",
                                  va="center", fontsize=8)  # fmt: skip
        axes.set_yticks(range(len(rows)), [_components(row, config) for row, config in rows.items()])
        axes.invert_yaxis()
        axes.margins(x=0.14)
        axes.set_xlabel(said)
        handles = [Patch(color=COLORS[source.kind], label=source.label) for source in shown]
        figure.legend(handles=handles, loc="outside lower center", ncols=2, handlelength=1)
    described = f"{said}: " + "; ".join(
        f"{source.label} " + ", ".join(f"{row} {value:.2f}" for row, value in values.items())
        for source, values in shown.items()
    )
    return svg(figure, _name(name), described)


def _components(row: str, config: Mapping[str, Json]) -> str:
    components: Sequence[str] = config.get("components") or ()
    return row if not components else f"{row}\n+ {components[-1]}"


def _name(text: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in text)
