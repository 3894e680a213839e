"""Choose how the report's figures draw the numbers of each source.

A source's kind (published, predicted, measured or emulated) determines its colour. But sources also
differ in other ways than colour: the lines of two sources of one kind have different dashes and
markers, and the bars of any two sources have different hatches.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from reproduce.report.figure import SERIES
from reproduce.report.subjects import Kind, Source

COLORS: dict[Kind, str] = {
    "published": SERIES[0],
    "predicted": SERIES[1],
    "measured": SERIES[2],
    "emulated": SERIES[3],
}
Dash = str | tuple[float, tuple[float, ...]]  # as matplotlib's argument `linestyle`
# For each kind: the dashes and markers of its first source, of its second source, and so on.
DASHES: dict[Kind, list[Dash]] = {
    "published": ["-"],
    "predicted": ["--", (0, (9, 2)), (0, (5, 1, 2, 1)), (0, (2, 1))],
    "measured": ["-", (0, (7, 1)), (0, (3, 1)), (0, (7, 1, 3, 1))],
    "emulated": ["-.", (0, (4, 1, 1, 1, 1, 1)), (0, (3, 2)), (0, (10, 2, 2, 2))],
}
MARKERS: dict[Kind, str] = {
    "published": "o",
    "predicted": "sPH",
    "measured": "DXp8d",
    "emulated": "^v<>h",
}
HATCHES = (None, "///", "...", "xxx", "\\\\\\", "+++", "|||")  # of bars, source by source


@dataclass(frozen=True)
class Look:
    """The colour, dash and marker with which a source's line is drawn."""

    color: str
    dash: Dash
    marker: str


def looks(sources: Sequence[Source]) -> dict[Source, Look]:
    """Return the look of each source of an experiment or published table."""
    seen: Counter[Kind] = Counter()
    found = {}
    for source in sources:
        found[source] = look(source.kind, seen[source.kind])
        seen[source.kind] += 1
    return found


def look(kind: Kind, place: int = 0) -> Look:
    """Return the look of a source. `place` is its number among the sources of its kind, from 0."""
    dashes = DASHES[kind]
    markers = MARKERS[kind]
    return Look(COLORS[kind], dashes[place % len(dashes)], markers[place % len(markers)])
