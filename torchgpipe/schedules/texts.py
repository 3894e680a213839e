"""Schedules as text: pictures, and the files of `torch.distributed.pipelining`.

    0 | 0 1 . . B0  B1      A row is a device, and a column is a unit of time.
    1 | . 0 B0  1 B1        A forward takes one unit, a whole backward two.

The entries of a picture are:

- 1: the forward of micro-batch 1;
- R1: the recomputation of micro-batch 1;
- B1: the whole backward of micro-batch 1;
- I1 and W1: the two halves of the backward of micro-batch 1, if the schedule splits backwards. I1
  computes the gradients of the inputs, and W1 later those of the weights;
- a dot: a unit in which the device waits.

If a device has several stages, a letter after the number names the stage: a is the device's first
stage, and b the second.

A schedule file is a table in CSV format, with a row for each device. The entry 0F1, for example,
means stage 0, kind F and micro-batch 1. The kinds are F for a forward, B for a whole backward, I
for a backward of the inputs, and W for a backward of the weights. Schedule files have no
recomputations. An empty entry means that the device waits.
"""

import csv
import re
from math import ceil
from os import PathLike

from torchgpipe.schedules.action import LETTERS, Action
from torchgpipe.schedules.replay import Event, Timeline

File = str | PathLike[str]

# The numbers have at most 18 digits, because Python does not read thousands of digits.
_ENTRY = re.compile(r"(\d{1,18})([FIWB])(\d{1,18})")
# Matches entries of PyTorch's files for which this library has no action.
_DERIVED = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB])\d*")
_LETTER = dict(zip(LETTERS.values(), LETTERS, strict=True))


def drawn(units: Timeline) -> str:
    """Draw a timeline as text, with a row for each device and a column for each unit of time."""
    rows = list(map(_entries, units.devices))
    width = 0
    for row in rows:
        for entry, start, end in row:
            width = max(width, ceil(len(entry) / (end - start)))
    digits = len(str(len(rows) - 1))
    lines: list[str] = []
    for d, row in enumerate(rows):
        line = f"{d:{digits}} | "
        now = 0
        for entry, start, end in row:
            line += ".".ljust(width) * (start - now)
            line += entry.ljust(width * (end - start))
            now = end
        lines.append(line.rstrip())
    return "\n".join(lines)


def _entries(events: list[Event]) -> list[tuple[str, int, int]]:
    """Return for each event of one device a tuple: its text with a space after it, start, end."""
    stages = sorted({event.partition for event in events})
    entries = []
    for kind, micro_batch, stage, start, end in events:
        letter = "" if kind == "forward" else _LETTER[kind]
        which = chr(ord("a") + stages.index(stage)) if len(stages) > 1 else ""
        entries.append((f"{letter}{micro_batch}{which} ", int(start), int(end)))
    return entries


def written(file: File, units: Timeline) -> None:
    """Write a schedule file: a row lists what a device does in each unit of time."""
    with open(file, "w", newline="") as opened:
        writer = csv.writer(opened)
        for events in units.devices:
            row: list[str] = []
            for event in events:
                waited = int(event.start) - len(row)
                row += [""] * waited
                row.append(f"{event.partition}{_LETTER[event.kind]}{event.micro_batch}")
            writer.writerow(row)


def read(file: File) -> tuple[list[int], list[list[Action]]]:
    """Read a schedule file, and return each stage's device and each device's actions.

    Raises:
        ValueError: If the file is empty or is not a text in UTF-8, if an entry is not an action, or
            if a stage has no entries.
    """
    placement: dict[int, int] = {}
    lists: list[list[Action]] = []
    with open(file, newline="", encoding="utf-8-sig") as opened:
        try:
            rows = list(filter(None, csv.reader(opened)))
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError(f"{file} is not a CSV file in UTF-8: {error}") from None
        for d, row in enumerate(rows):
            actions: list[Action] = []
            for cell in row:
                entry = cell.strip()
                found = _ENTRY.fullmatch(entry)
                if found:
                    stage, letter, micro_batch = found.groups()
                    actions.append(Action(LETTERS[letter], int(micro_batch), int(stage)))
                    placement.setdefault(int(stage), d)
                elif entry and not _DERIVED.fullmatch(entry):
                    raise ValueError(
                        f"the schedule file {file}, device {d}: {entry[:100]!r} is not an entry "
                        "such as 0F1, which means stage 0, kind F and micro-batch 1; the kinds are "
                        "F, I, W and B"
                    )
            lists.append(actions)
    if not placement:
        raise ValueError(
            f"the schedule file {file} has no entry such as 0F1, which means stage 0, kind F "
            "(forward) and micro-batch 1"
        )
    stages = range(len(placement))
    for stage in stages:
        if stage not in placement:
            raise ValueError(f"{file} has entries of stage {max(placement)}, but none of {stage}")
    return [placement[stage] for stage in stages], lists
