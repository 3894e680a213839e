"""Match the rows of several sides: rows with the same configuration share a line.

Two rows have the same configuration if they agree in every field that both record, except fields that a run chooses
itself (`CHOSEN`, a profiled balance); both or neither must be emulated, and both measured with the same engine. A
published row is also matched with the rows whose `published` names it: on each side with those of the same
configuration or, if there are none, with all of them, at any scale. A note then says what differs.
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

CHOSEN = ("balance",)  # fields that a run chooses itself if the experiment does not fix them
FIELDS = ("experiment", "row", "scale", "device", "engine")  # besides those of the configuration
ALIASES = {"n": "partitions", "m": "chunks"}


@dataclass
class Line:
    """Hold one line of the comparison: at most one row of each side, by the side's number."""

    experiment: str
    entries: dict[int, Entry] = field(default_factory=dict)
    label: str = ""

    @property
    def first(self) -> Entry:
        """Give the row that names and describes the line: the first one that is not published, if any."""
        return min(self.entries.values(), key=lambda entry: entry.result.status == "published")


def grouped(items: Iterable[T], key: Callable[[T], Key]) -> dict[Key, list[T]]:
    """Group items by a key: return a list of items for each key."""
    groups: dict[Key, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def match(sides: Sequence[Side]) -> list[Line]:
    """Return the lines that hold every row of every side, those of one experiment together."""
    lines: list[Line] = []
    for number, side in enumerate(sides):
        for entry in side.entries:
            if entry.result.status != "published":
                _place(lines, number, entry, entry.result.experiment)
    for number, side in enumerate(sides):
        for entry in side.entries:
            if entry.result.status == "published":
                _place_published(lines, number, entry)
    _label(lines)
    order = list(dict.fromkeys(line.experiment for line in lines))
    return sorted(lines, key=lambda line: order.index(line.experiment))


def differing(one: Entry, other: Entry) -> list[str]:
    """Return the names of the fields that both rows record with different values."""
    ours, theirs = one.result.config, other.result.config
    return [name for name in ours if name in theirs and ours[name] != theirs[name]]


def same_work(one: Entry, other: Entry) -> bool:
    """Say whether two rows did the same work: nothing but what runs choose by themselves differs."""
    return set(differing(one, other)) <= set(CHOSEN)


def value_text(line: Line, name: str) -> str:
    """Write a field of the line's configuration, or another one of `FIELDS`; a dash if it has none."""
    name = ALIASES.get(name, name)
    if name == "experiment":
        return line.experiment
    for entry in (line.first, *line.entries.values()):
        own = getattr(entry.result, name) if name in FIELDS else entry.result.config.get(name)
        if own is not None:
            return own if isinstance(own, str) else json.dumps(own, separators=(",", ":"))
    return "-"


def pick(lines: Sequence[Line], filters: Sequence[str]) -> list[Line]:
    """Return the lines that pass all filters, such as `n=2,4`: a field and its values; raise `Error` if none does."""
    wanted: dict[str, list[str]] = {}
    for text in filters:
        name, _, values = text.partition("=")
        if not (name and values):
            raise Error(f"--filter {text}: give a field and its values, as in --filter n=2,4")
        wanted.setdefault(name, []).extend(values.split(","))
    for name, allowed in wanted.items():
        known = dict.fromkeys(value_text(line, name) for line in lines)
        known.pop("-", None)
        if not known:
            fields = dict.fromkeys(field for line in lines for field in line.first.result.config)
            raise Error(
                f"--filter {name}=...: no row has {name}; there are {', '.join((*FIELDS, *fields))}"
            )
        lines = [line for line in lines if value_text(line, name) in allowed]
        if not lines:
            raise Error(
                f"--filter {name}={','.join(allowed)}: no row is left; {name} is {', '.join(known)}"
            )
    return list(lines)


def _place(lines: list[Line], number: int, entry: Entry, experiment: str) -> None:
    """Put a row on the line that fits best, or on a new one."""

    def likeness(line: Line) -> int:
        other = line.first
        same = [
            getattr(other.result, name) == getattr(entry.result, name)
            for name in ("row", "scale", "device")
        ]
        return sum([*same, other.hardware == entry.hardware])

    free = [line for line in lines if line.experiment == experiment and number not in line.entries]
    if fitting := [line for line in free if _same(line.first, entry)]:
        max(fitting, key=likeness).entries[number] = entry
    else:
        lines.append(Line(experiment, {number: entry}))


def _place_published(lines: list[Line], number: int, entry: Entry) -> None:
    """Put a published row on every line that reproduces it; if there is none, on a line as other rows."""
    name = f"{entry.result.experiment}/{entry.result.row}"
    reproducing = [
        line for line in lines if number not in line.entries and line.first.result.published == name
    ]
    for side in {side for line in reproducing for side in line.entries}:
        theirs = [line for line in reproducing if side in line.entries]
        for line in [line for line in theirs if same_work(line.entries[side], entry)] or theirs:
            line.entries[number] = entry
    if not reproducing:
        tables = {experiment.table: experiment.name for experiment in EXPERIMENTS.values()}
        _place(lines, number, entry, tables.get(entry.result.experiment, entry.result.experiment))


def _same(one: Entry, other: Entry) -> bool:
    both = (one.result, other.result)
    ways = {(each.emulated, each.engine) for each in both}
    if len(ways) > 1 or not same_work(one, other):
        return False
    # The fields do not tell if both rows are published, or share no field. Then the names must be the same.
    named = all(result.status == "published" for result in both) or not (
        both[0].config.keys() & both[1].config.keys()
    )
    return not named or both[0].row == both[1].row


def _label(lines: Sequence[Line]) -> None:
    """Name the lines after their rows, with "emulated" or the engine, if that is not threads, in brackets.

    Add scale, device or hardware where lines would have the same name.
    """
    for line in lines:
        result = line.first.result
        how = "emulated" if result.emulated else result.engine
        line.label = result.row + f" ({how})" * (how != "threads")
    for k in range(3):
        for group in grouped(lines, lambda line: (line.experiment, line.label)).values():
            extras = [
                (line.first.result.scale, line.first.result.device, line.first.hardware)[k]
                for line in group
            ]
            for line, extra in zip(group, extras, strict=True):
                if extra is not None and len(set(extras)) > 1:
                    line.label += f" ({extra})"
