"""Find rows that have the same name on two sides (such as runs), but different settings.

Such rows (configurations) do not match, so each of them has a line of its own in the comparison. A
note says in which settings they differ. Without the note, the user would think that each side lacks
a row.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from reproduce.numbers.match import Line, differing, likeness
from reproduce.numbers.sources import Entry

LONGEST_VALUE = 20  # characters of a value in a note


@dataclass(frozen=True)
class Unmatched:
    """A row of the first side (such as a run), and a row of the same name on another side.

    The two rows have different settings, so each of them has a line of its own.

    Attributes:
        line: The line of the first side's row.
        other: The line of the other side's row.
        side: The index of the other side.
    """

    line: Line
    other: Line
    side: int

    @property
    def fields(self) -> list[str]:
        """Return the names of the fields in which the settings of the two rows differ."""
        ours, theirs = self._entries
        names = differing(ours, theirs)
        if ours.result.scale != theirs.result.scale:
            names.insert(0, "scale")
        return names

    @property
    def text(self) -> str:
        """Return a text with the differing fields, such as `link ("p40x8" / "h100x8")`.

        If there are several fields, or if the values are long, the text has only the fields' names.
        """
        names = self.fields
        if len(names) == 1 and names != ["scale"]:
            (name,) = names
            both = [json.dumps(entry.result.config[name]) for entry in self._entries]
            if max(map(len, both)) <= LONGEST_VALUE:
                return f"{name} ({' / '.join(both)})"
        return ", ".join(names)

    @property
    def _entries(self) -> tuple[Entry, Entry]:
        return self.line.entries[0], self.other.entries[self.side]


def unmatched(lines: Sequence[Line], sides: int) -> list[Unmatched]:
    """Pair rows that have the same name but are not compared, because their settings differ.

    A side of the comparison is, for example, a run. Each row of the first side that another side
    lacks is paired with a row of the same name that this other side has and the first side lacks.
    If there are several such rows, the row that is most similar is taken: in scale (set of sizes),
    device and settings.

    Args:
        lines: The lines of the table that compares the sides.
        sides: The number of sides.
    """
    pairs = []
    for side in range(1, sides):
        alone = [line for line in lines if side in line.entries and 0 not in line.entries]
        for line in lines:
            if 0 not in line.entries or side in line.entries:
                continue
            found = _same_name(line, alone, side)
            if found is not None:
                alone.remove(found)
                pairs.append(Unmatched(line, found, side))
    return pairs


def _same_name(line: Line, others: Sequence[Line], side: int) -> Line | None:
    """Return the line in `others` that is most similar to `line`, or None if none is similar.

    Only lines with a row of the same name count. This row must have run in the same way as the row
    of `line`: emulated or not, and with the same engine.
    """
    ours = line.entries[0]

    def likeness_to_ours(other: Line) -> tuple[int, int]:
        theirs = other.entries[side]
        return likeness(ours, theirs), -len(differing(ours, theirs))

    possible = [other for other in others if _name(other, side) == _name(line, 0)]
    return max(possible, key=likeness_to_ours, default=None)


def _name(line: Line, side: int) -> tuple[str, str, bool, str]:
    """Return a row's experiment, its name, whether it is emulated, and its engine.

    Only rows that are equal in all four of these are paired.
    """
    result = line.entries[side].result
    return line.experiment, result.row, result.emulated, result.engine
