"""Schedules as text: pictures, and PyTorch's files.

    0 | 0 1 . . B0  B1          A row is a device, a column a unit of time: a forward takes one, a whole backward two.
    1 | . 0 B0  1 B1            A bare number is a micro-batch's forward. R is a recomputation, B a backward, I that of
                                the inputs, W that of the weights; in a dot, the device waits.

Where a device has several stages, a letter behind the number says which: a its first, b its second, and so on.

A file has a row for each device, of what it does as stage, kind and micro-batch: 0F1. The kinds are F forward, I
backward of inputs, W backward of weights, B both. Recomputation is not written. Where an entry is empty, the device
waits while others do an action.
"""

import csv
import re
from os import PathLike

from torchgpipe.schedules.action import LETTERS, Action
from torchgpipe.schedules.replay import Timeline

_ENTRY = re.compile(r"(\d+)([FIWB])(\d+)")
_DERIVED = re.compile(
    r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB])\d*"
)  # PyTorch writes them, too
_LETTER = {kind: letter for letter, kind in LETTERS.items()}


def drawn(units: Timeline) -> str:
    """Return the picture of what each device does. Columns are as wide as an entry needs."""
    rows = []
    for events in units.devices:
        own = sorted({event.partition for event in events})
        which = {s: chr(ord("a") + k) * (len(own) > 1) for k, s in enumerate(own)}
        names = [f"{_LETTER[kind]}{i}{which[s]} ".removeprefix("F") for kind, i, s, *_ in events]
        rows.append(
            [
                (name, int(event.start), int(event.end))
                for name, event in zip(names, events, strict=True)
            ]
        )
    width = max(-(-len(entry) // (end - start)) for row in rows for entry, start, end in row)
    lines = []
    for d, row in enumerate(rows):
        lines.append(f"{d:{len(str(len(rows) - 1))}} | ")
        for (entry, start, end), now in zip(row, [0, *(end for *_, end in row)], strict=False):
            lines[d] += ".".ljust(width) * (start - now) + entry.ljust(width * (end - start))
    return "\n".join(map(str.rstrip, lines))


def written(file: str | PathLike[str], units: Timeline) -> None:
    """Write what each device does, in units of time, into a file."""
    with open(file, "w", newline="") as opened:
        for events in units.devices:
            row = {int(e.start): f"{e.partition}{_LETTER[e.kind]}{e.micro_batch}" for e in events}
            csv.writer(opened).writerow([row.get(unit, "") for unit in range(1 + max(row))])


def read(file: str | PathLike[str]) -> tuple[list[int], list[list[Action]]]:
    """Return the device of each stage, and the actions of each device; `ValueError` if an entry is none."""
    placement: dict[int, int] = {}
    lists: list[list[Action]] = []
    with open(file, newline="") as opened:
        for d, row in enumerate(filter(None, csv.reader(opened))):
            lists.append([])
            for entry in map(str.strip, row):
                found = _ENTRY.fullmatch(entry)
                if found:
                    lists[d].append(Action(LETTERS[found[2]], int(found[3]), int(found[1])))
                    placement.setdefault(int(found[1]), d)
                elif entry and not _DERIVED.fullmatch(entry):
                    raise ValueError(
                        f"{file}, device {d}: {entry!r} is not stage, F, I, W or B, and micro-batch: 0F1"
                    )
    return [placement.get(s, 0) for s in range(1 + max(placement, default=0))], lists
