"""Draw speed-up over n, for each m, of every source, with the ideal n·m / (n + m - 1) of equal partitions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from reproduce.report.figure import FAINT, SERIES, new_figure, styled, svg
from reproduce.report.subjects import Source, Subject

COLORS = {"published": SERIES[0], "predicted": SERIES[1], "emulated": SERIES[3], "measured": SERIES[2]}
LOOKS = {"published": "-o", "predicted": "--s", "emulated": "-.^", "measured": "-D"}
Place = tuple[int, int]  # n, m
Curves = Mapping[Source, Mapping[Place, float]]


def ideal(n: int, m: int) -> float:
    """Return the speed-up of n equal partitions and m micro-batches over one device (GPipe paper, section 2.3)."""
    return n * m / (n + m - 1)


def speed_up_figures(subject: Subject) -> Iterator[tuple[str, str]]:
    """Yield figures with their captions: one for each m that several n share, or else one along the table's rows."""
    places = {row: (config.get("partitions") or 1, config.get("chunks") or 1) for row, config in subject.rows.items()}
    along = list(dict.fromkeys(places.values()))
    curves: dict[Source, dict[Place, float]] = {}
    for source in subject.sources:
        curves[source] = {places[row]: each.middle for row, each in subject.readings(source, "speedup").items()}
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
    """Draw curves through some places: over n where they have the same m, else one after another."""
    fixed = len({m for _, m in places}) == 1
    title = f"m = {places[0][1]}" if fixed else f"n and m as published, {subject.name}"
    at = {place: place[0] if fixed else i for i, place in enumerate(places)}
    fine = {(n, places[0][1]): n for n in range(1, places[-1][0] + 1)} if fixed else at
    figure, axes = new_figure(2.6)
    axes.grid(axis="y")
    axes.plot(list(fine.values()), [ideal(*place) / base for place in fine], ":", color=FAINT,
              label="ideal n·m/(n+m-1)")  # fmt: skip
    described = []
    for source, points in curves.items():
        own = [place for place in places if place in points]
        axes.plot([at[place] for place in own], [points[place] for place in own], LOOKS[source.kind],
                  color=COLORS[source.kind], label=source.label)  # fmt: skip
        described.append(f"{source.label} {', '.join(f'n={place[0]} {points[place]:.2f}' for place in own)}")
    axes.set_xticks(list(at.values()), [_tick(*place, fixed) for place in places])
    axes.set_xlabel("n, partitions" if fixed else "")
    axes.set_title(title if fixed else "speed-up")
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=2)
    caption = f"Speed-up over the table's first row{f', {title}' if fixed else ''}."
    name = f"{subject.name}-speed-up-{title}"
    return svg(figure, name, f"Speed-up over n for {title}: {'; '.join(described)}"), caption


def _tick(n: int, m: int, fixed: bool) -> str:
    if fixed:
        return str(n)
    return "plain" if n == m == 1 else f"n={n}\nm={m}"
