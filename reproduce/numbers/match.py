"""Match the rows of several sides (such as runs) for the table that compares these sides.

A row is a configuration that was run. Rows that match share a line of the table. Two rows match if
all of these conditions are met:

- Every field that both rows have has the same value. Fields that a run may choose itself, such as a
  profiled balance, do not count.
- Both rows are emulated, or neither is.
- The same engine (what runs partitions in parallel, such as threads or processes) ran both rows.

A published row also matches the rows that reproduce it: they name the published row in their field
`published`. If some of these rows have the same configuration as the published row, only they
match. Otherwise all of them match, at any scale (set of sizes), and a note says what differs.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from reproduce.error import Error
from reproduce.experiments import EXPERIMENTS
from reproduce.numbers.sources import Entry, Side

T = TypeVar("T")
Key = TypeVar("Key")

CHOSEN = ("balance",)  # fields that a run may choose itself, such as a profiled balance
ALIASES = {"n": "partitions", "m": "chunks"}
FIELDS = ("experiment", "row", "scale", "device", "engine")  # fields of a row besides its config


@dataclass
class Line:
    """A line of the comparison's table: matching rows, at most one of each side (such as a run).

    Attributes:
        experiment: The experiment of the rows.
        entries: Maps the index of a side to its row.
        label: The text in the first cell.
    """

    experiment: str
    entries: dict[int, Entry] = field(default_factory=dict)
    label: str = ""

    @property
    def first(self) -> Entry:
        """Return the row that gives the line its name and its description.

        This is the first row that is not published. If all rows are published, it is the first row.
        """
        entries = list(self.entries.values())
        for entry in entries:
            if not _is_published(entry):
                return entry
        return entries[0]


def grouped(items: Iterable[T], key: Callable[[T], Key]) -> dict[Key, list[T]]:
    """Group items by a key: return a dictionary with the list of items for each key."""
    groups: dict[Key, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def match(sides: Sequence[Side]) -> list[Line]:
    """Return the lines of a table that compares sides, such as runs.

    Each row (configuration) of each side is on a line, and rows that match share a line. The lines
    of an experiment follow each other.
    """
    lines: list[Line] = []
    for number, side in enumerate(sides):
        own = [entry for entry in side.entries if not _is_published(entry)]
        # First place the rows that have an equal partner, so that no other row takes it.
        rest = [entry for entry in own if not _place_beside_equal(lines, number, entry)]
        for entry in rest:
            _place(lines, number, entry, entry.result.experiment)
    for number, side in enumerate(sides):
        for entry in side.entries:
            if _is_published(entry):
                _place_published(lines, number, entry)
    _label(lines)
    ordered = []
    for of_experiment in grouped(lines, lambda line: line.experiment).values():
        ordered += of_experiment
    return ordered


def differing(one: Entry, other: Entry) -> list[str]:
    """Return the names of the settings that two rows both have, but with different values."""
    ours = one.result.config
    theirs = other.result.config
    return [name for name in ours if name in theirs and ours[name] != theirs[name]]


def same_work(one: Entry, other: Entry) -> bool:
    """Return whether two rows did the same work.

    Only fields that a run may choose itself, such as a profiled balance, may differ.
    """
    return set(differing(one, other)) <= set(CHOSEN)


MOST_ALIKE = 4
"""How many properties of two rows `likeness` compares."""


def likeness(one: Entry, other: Entry) -> int:
    """Return how similar two rows are: how many of these four properties are equal in both.

    The properties are the name, the scale (set of sizes), the device and the hardware.
    """
    ours = one.result
    theirs = other.result
    alike = [ours.row == theirs.row, ours.scale == theirs.scale, ours.device == theirs.device]
    alike.append(one.hardware == other.hardware)
    return sum(alike)


def value_text(line: Line, name: str) -> str:
    """Return the text of a field's value in a line of a comparison; a dash if it has no value.

    The field is one of `FIELDS`, or a field in the configuration of the line's rows.
    """
    name = ALIASES.get(name, name)
    if name == "experiment":
        return line.experiment
    for entry in (line.first, *line.entries.values()):
        result = entry.result
        own = getattr(result, name) if name in FIELDS else result.config.get(name)
        if isinstance(own, str):
            return own
        if own is not None:
            return json.dumps(own, separators=(",", ":"))
    return "-"


def pick(lines: Sequence[Line], filters: Sequence[str]) -> list[Line]:
    """Return the lines that pass all filters.

    A filter is a field and the values that it may have, such as `n=2,4`.

    Raises:
        Error: A filter cannot be read, or no line passes all filters.
    """
    wanted: dict[str, list[str]] = {}
    for text in filters:
        name, _, values = text.partition("=")
        if not name or not values:
            raise Error(f"--filter {text}: give a field and its values, as in --filter n=2,4")
        wanted.setdefault(name, []).extend(values.split(","))
    picked = list(lines)
    for name, allowed in wanted.items():
        picked = _with_values(picked, name, allowed)
    return picked


def _with_values(lines: Sequence[Line], name: str, allowed: Sequence[str]) -> list[Line]:
    """Apply one `--filter name=value,...`: return the lines whose field has an allowed value.

    Args:
        lines: The lines of a table.
        name: The name of the field.
        allowed: The values that the field may have.

    Raises:
        Error: No line has the field, or no line has an allowed value.
    """
    known: dict[str, None] = {}
    picked = []
    for line in lines:
        text = value_text(line, name)
        known[text] = None
        if text in allowed:
            picked.append(line)
    known.pop("-", None)
    if not known:
        fields: dict[str, None] = {}
        for line in lines:
            fields.update(dict.fromkeys(line.first.result.config))
        names = ", ".join([*FIELDS, *fields])
        raise Error(f"--filter {name}=...: no row has {name}; there are {names}")
    if not picked:
        raise Error(
            f"--filter {name}={','.join(allowed)}: no row to compare has this value; choose from "
            f"{', '.join(known)}"
        )
    return picked


def _is_published(entry: Entry) -> bool:
    return entry.result.status == "published"


def _place(lines: list[Line], number: int, entry: Entry, experiment: str) -> None:
    """Add a row of a side (such as a run) to the line with matching rows that are most similar.

    If no line has rows that match, add the row on a new line.
    """
    best, _ = _best_line(lines, number, entry, experiment)
    if best is None:
        lines.append(Line(experiment, {number: entry}))
    else:
        best.entries[number] = entry


def _place_beside_equal(lines: Sequence[Line], number: int, entry: Entry) -> bool:
    """Add a row to the line with a row of the same name, scale, device and hardware.

    Return whether there is such a line.
    """
    best, alike = _best_line(lines, number, entry, entry.result.experiment)
    if best is None or alike < MOST_ALIKE:
        return False
    best.entries[number] = entry
    return True


def _best_line(
    lines: Sequence[Line], number: int, entry: Entry, experiment: str
) -> tuple[Line | None, int]:
    """Return the line with matching rows that are most similar to a row, and how similar they are.

    The line is None if no line without a row of the side `number` has matching rows.
    """
    best = None
    most = -1
    for line in lines:
        if line.experiment != experiment or number in line.entries:
            continue
        alike = likeness(line.first, entry)
        if alike > most and _same(line.first, entry):
            best = line
            most = alike
    return best, most


def _place_published(lines: list[Line], number: int, entry: Entry) -> None:
    """Add a published row to the lines whose rows reproduce it.

    If there are no such lines, add the row to the line that fits best, or to a new line.
    """
    table = entry.result.experiment
    link = f"{table}/{entry.result.row}"
    reproducing: dict[int, list[Line]] = {}  # maps the index of a side to lines with its rows
    for line in lines:
        if number not in line.entries and line.first.result.published == link:
            for side in line.entries:
                reproducing.setdefault(side, []).append(line)
    for side, theirs in reproducing.items():
        same = [line for line in theirs if same_work(line.entries[side], entry)]
        for line in same or theirs:
            line.entries[number] = entry
    if not reproducing:
        experiments = {experiment.table: experiment.name for experiment in EXPERIMENTS.values()}
        _place(lines, number, entry, experiments.get(table, table))


def _same(one: Entry, other: Entry) -> bool:
    """Return whether two rows match, so that they can be compared on the same line of the table."""
    ours = one.result
    theirs = other.result
    if ours.emulated != theirs.emulated or ours.engine != theirs.engine:
        return False
    if not same_work(one, other):
        return False
    # A row that `run --set` changed is itself only, even if its settings are those of another row.
    if ours.config.get("changed_from") != theirs.config.get("changed_from"):
        return False
    # If both rows are published, or if the rows have no field in common, the fields do not tell
    # whether the rows belong together. In these cases, the names of the rows must be equal.
    both_published = _is_published(one) and _is_published(other)
    share_a_field = not ours.config.keys().isdisjoint(theirs.config)
    if both_published or not share_a_field:
        return ours.row == theirs.row
    return True


def _label(lines: Sequence[Line]) -> None:
    """Set the label of each line, such as `GPipe n2m4 (emulated) (small)`.

    A label is the name of the row. If the row was emulated, "(emulated)" follows. Otherwise, if an
    engine other than `threads` ran the partitions, the engine's name follows. Where several lines
    still have the same label, the scale (set of sizes), the device or the hardware is added if it
    differs.
    """
    for line in lines:
        result = line.first.result
        line.label = result.row
        how = "emulated" if result.emulated else result.engine
        if how != "threads":
            line.label += f" ({how})"
    _distinguish(lines, lambda entry: entry.result.scale)
    _distinguish(lines, lambda entry: entry.result.device)
    _distinguish(lines, lambda entry: entry.hardware)


def _distinguish(lines: Sequence[Line], extra: Callable[[Entry], str | None]) -> None:
    """Make equal labels of a table's lines different, by adding a text in brackets to each.

    Args:
        lines: The lines of the table.
        extra: A function that returns the text for a row, such as its device, or None. If all lines
            with the same label have the same text, nothing is added.
    """
    for group in grouped(lines, lambda line: (line.experiment, line.label)).values():
        extras = [extra(line.first) for line in group]
        if len(set(extras)) == 1:
            continue
        for line, text in zip(group, extras, strict=True):
            if text is not None:
                line.label += f" ({text})"
