"""Draw a subject's numbers by source: speed-ups as curves, memory and the ablation's components as bars."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from reproduce.numbers.metrics import BYTES, over
from reproduce.report.figure import BACK, DEVICES, FAINT, SERIES, new_figure, styled, svg
from reproduce.report.subjects import RUN, Source, Subject
from reproduce.tables.history import Line, name_of
from reproduce.tables.output import Number
from torchgpipe.plan.report import figure as figure_text

COLORS = {
    "published": SERIES[0],
    "predicted": SERIES[1],
    "emulated": SERIES[3],
    "measured": SERIES[2],
}
LOOKS = {"published": "-o", "predicted": "--s", "emulated": "-.^", "measured": "-D"}
Place = tuple[int, int]  # n, m
Curves = Mapping[Source, Mapping[Place, float]]


def ideal(n: int, m: int) -> float:
    """Return the speed-up of n equal partitions and m micro-batches over one device (GPipe paper, section 2.3)."""
    return n * m / (n + m - 1)


def speed_up_figures(subject: Subject) -> Iterator[tuple[str, str]]:
    """Yield figures and captions: a figure over n for each m, or one over the rows if m changes together with n."""
    places = {
        row: (config.get("partitions") or 1, config.get("chunks") or 1)
        for row, config in subject.rows.items()
    }
    along = list(dict.fromkeys(places.values()))
    curves: dict[Source, dict[Place, float]] = {}
    for source in subject.sources:
        curves[source] = {
            places[row]: each.middle for row, each in subject.readings(source, "speedup").items()
        }
    curves = {source: points for source, points in curves.items() if len(points) > 1}
    if not curves or len(along) == 1 or subject.several_models:
        return
    base = ideal(*along[0])
    ms = sorted({m for _, m in along})
    if any(list(m for _, m in places.values()).count(m) == 1 for m in ms):  # m changes along with n
        yield _figure(subject, curves, along, base)
        return
    ns = sorted({n for n, _ in along})
    yield from (_figure(subject, curves, [(n, m) for n in ns], base) for m in ms)


@styled
def _figure(subject: Subject, curves: Curves, places: list[Place], base: float) -> tuple[str, str]:
    """Draw a curve for each source. The x-axis is n if all places have the same m, else it lists the places."""
    fixed = len({m for _, m in places}) == 1
    m = places[0][1]
    title = f"{m} micro-batch{'es' * (m > 1)}" if fixed else f"n and m as published, {subject.name}"
    at = {place: place[0] if fixed else i for i, place in enumerate(places)}
    fine = {(n, places[0][1]): n for n in range(1, places[-1][0] + 1)} if fixed else at
    figure, axes = new_figure(2.6)
    axes.grid(axis="y")
    axes.plot(
        list(fine.values()),
        [ideal(*place) / base for place in fine],
        ":",
        color=FAINT,
        label="ideal, of equal tasks",
    )
    described = []
    for source, points in curves.items():
        own = [place for place in places if place in points]
        axes.plot(
            [at[place] for place in own],
            [points[place] for place in own],
            LOOKS[source.kind],
            color=COLORS[source.kind],
            label=source.label,
        )
        described.append(
            f"{source.label} {', '.join(f'n={place[0]} {points[place]:.2f}' for place in own)}"
        )
    ticks = [str(n) if fixed else "plain" if n == m == 1 else f"n={n}\nm={m}" for n, m in places]
    axes.set_xticks(list(at.values()), ticks)
    axes.set_xlabel("partitions (n)" if fixed else "partitions (n) and micro-batches (m)")
    axes.set_title(f"speed-up with {title}" if fixed else "speed-up")
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=2)
    caption = (
        f"Speed-up over the table's first row{f', {title}' if fixed else ''}. Ideal: n·m/(n+m-1)."
    )
    name = f"{subject.name}-speed-up-{title}"
    return svg(figure, name, f"Speed-up over n, {title}: {'; '.join(described)}"), caption


@styled
def history_figures(lines: Sequence[Line]) -> list[tuple[str, str]]:
    """Return a figure, and its caption, for each number of a run that differs between revisions."""
    found: dict[tuple[str, str], list[tuple[str, Number]]] = {}
    for line in sorted(lines, key=lambda line: line.date):
        for number in (each for each in line.numbers if each["kind"] in RUN):
            found.setdefault((name_of(number), line.machine), []).append((line.git.name(7), number))
    drawn = []
    for (name, machine), points in found.items():
        values, step = [number["value"] for _, number in points], len(points) // 6 + 1
        if len({*values}) > 1:
            figure, axes = new_figure(1.5)
            axes.grid(axis="y")
            low, high = (
                [x[end if end in x else "value"] for _, x in points] for end in ("lower", "upper")
            )
            axes.vlines(range(len(points)), low, high, color=FAINT, linewidth=4)
            axes.plot(values, LOOKS[points[0][1]["kind"]], color=COLORS[points[0][1]["kind"]])
            axes.set_xticks(
                range(0, len(points), step), [revision for revision, _ in points[::step]]
            )
            axes.set_ylabel(points[0][1]["unit"])
            said = ", ".join(
                f"{revision} {figure_text(number['value'], 3)}" for revision, number in points
            )
            drawn.append(
                (
                    svg(figure, f"history-{name}-{machine}", f"{name}: {said}"),
                    f"{name}; on {machine}.",
                )
            )
    return drawn


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
Stacks = dict[str, dict[str, float | None]]  # row -> part of the bar -> bytes, or None if unknown


@dataclass(frozen=True)
class Bar:
    """Hold a stacked bar: its parts as sizes and colours, and the text at its end."""

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
                caption = (
                    f"Peak of {kind} memory, each device stacked on the one before; {source.label}."
                )
                yield (
                    _stacked(f"{subject.name}-{source.label}-{kind}", source, stacks, kind),
                    caption,
                )
        if source.kind == "published" and not _ablated(subject) and (stacks := _published(source)):
            caption = "Reserved memory, summed over devices; published. What each device held was not published."
            yield _stacked(f"{subject.name}-published-memory", source, stacks, "reserved"), caption


def ablation_figures(subject: Subject) -> Iterator[tuple[str, str]]:
    """Yield a figure for each metric, with its caption, if the subject is an ablation."""
    for metric, meaning in ABLATED.items() if _ablated(subject) else ():
        values = {source: _over_first(subject, source, metric) for source in subject.sources}
        values = {source: own for source, own in values.items() if own}
        if values:
            caption = f"{meaning[0].upper()}{meaning[1:]} as components are added one by one."
            yield _grouped(f"{subject.name}-{metric}", subject, values, meaning), caption


def _published(source: Source) -> Stacks:
    """Stack the published parts of each row's memory. Rows that ran out of memory have None."""
    units = {
        name: BYTES[unit]
        for name, unit in source.record.unit.items()
        if name in PARTS and unit in BYTES
    }
    stacks: Stacks = {}
    for result in source.results:
        sizes = {name: result.values.get(name) for name in PARTS if name in units}
        if any(size is not None for size in sizes.values()):
            stacks[result.row] = {
                PARTS[x]: None if size is None else size * units[x] for x, size in sizes.items()
            }
    return stacks


def _ablated(subject: Subject) -> bool:
    """Say whether the rows differ in the components that they have."""
    return (
        len(
            {
                str(config["components"])
                for config in subject.rows.values()
                if "components" in config
            }
        )
        > 1
    )


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
        text = figure_text(sum(known.values()), 3) + ("" if len(known) == len(sizes) else " + ?")
        bars[row] = [Bar(text, [(size, PALETTE[what]) for what, size in known.items()])]
        each = (
            f"{what} {figure_text(known[what], 3)} {word}" if what in known else f"{what} unknown"
            for what in sizes
        )
        described.append(f"{row} {', '.join(each)}")
    labels = {what: PALETTE[what] for sizes in stacks.values() for what in sizes}
    figure = _bars(bars, f"{kind} memory, {word}", labels, columns=4, title=source.label)
    return svg(figure, name, f"{kind} memory, {source.label}: {'; '.join(described)}")


@styled
def _grouped(
    name: str, subject: Subject, values: Mapping[Source, Mapping[str, float]], meaning: str
) -> str:
    bars = {}
    for row, config in subject.rows.items():
        components = config.get("components")
        bars[f"{row}\n+ {components[-1]}" if components else row] = [
            Bar(
                f"{own[row]:.2f}",
                [(own[row], COLORS[source.kind])],
                "///" if source.kind == "predicted" else None,
            )
            if row in own
            else Bar("", [])
            for source, own in values.items()
        ]
    what, _, how = meaning.partition(", ")
    figure = _bars(
        bars, how, {source.label: COLORS[source.kind] for source in values}, columns=2, title=what
    )
    described = (
        f"{x.label} {', '.join(f'{row} {v:.2f}' for row, v in own.items())}"
        for x, own in values.items()
    )
    return svg(figure, name, f"{meaning}: {'; '.join(described)}")


def _bars(
    rows: Mapping[str, list[Bar]],
    axis: str,
    labels: Mapping[str, str],
    columns: int,
    title: str = "",
) -> Figure:
    """Draw the bars of each row, and a legend."""
    per_row = max(map(len, rows.values()))
    height = 0.8 / per_row
    figure, axes = new_figure(
        0.95 + len(rows) * (0.12 + 0.19 * per_row) + 0.17 * -(-len(labels) // columns)
    )
    axes.grid(axis="x")
    for place, bars in enumerate(rows.values()):
        for i, bar in enumerate(bars):
            at, end = place - 0.4 + height * (i + 0.5), 0.0
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
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.margins(x=0.14)
    axes.set_xlabel(axis)
    axes.set_title(title)
    figure.legend(
        handles=[Patch(color=color, label=label) for label, color in labels.items()],
        loc="outside lower center",
        ncols=min(columns, len(labels)),
        handlelength=1,
        columnspacing=1,
    )
    return figure
