"""Keep a history: a line of JSON for each revision and machine, whose numbers are as in `reproduce.tables.output`."""

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from reproduce.error import Error
from reproduce.machine.git import Git, checkout, commit_of, git
from reproduce.numbers.metrics import better
from reproduce.numbers.sources import load_side, side_of
from reproduce.records.places import Json, decode, find_record, parse_json
from reproduce.records.record import TIME
from reproduce.tables.output import Number, of_entry

KINDS = ("measured", "emulated", "predicted")
NEEDED = {"experiment", "row", "kind", "metric", "unit", "value"}
KEPT = ("time", "speedup", "memory", "reserved", "top1_error")  # and counts


class Line(Struct, frozen=True):
    """Hold the numbers of a revision on a machine. `date` is the commit's."""

    git: Git
    date: str
    machine: str
    numbers: list[Number]


def line_of(names: Sequence[str]) -> Line:
    """Return the line of these sides (`load_side`), without what was disturbed, or raise `Error`."""
    found = [
        (record, find_record(name).exists())
        for name in names
        for record in load_side("", name).records
    ]
    # Counts and predictions do not say of what they are: files are of what is checked out.
    gits = {
        record.run.git if record.run else checkout(Path()) if here else None
        for record, here in found
    }
    ran = [record.run.machine for record, _ in found if record.run]
    machines = {
        ", ".join([x.cpu, f"{x.cores} cores", *(gpu.name for gpu in x.gpus)]) for x in ran
    } or {"any machine"}
    numbers = [
        {field: value for field, value in number.items() if value is not None}
        for entry in side_of("", "", [record for record, _ in found]).entries
        for number in of_entry(entry)
        if number["kind"] in KINDS and not number.get("disturbed", True)
        if number["metric"] in KEPT or number["unit"] == "count"
    ]
    source = next(iter(gits), None)
    if source is None or len(gits) > 1 or len(machines) > 1 or not numbers:
        of = ", ".join(sorted(each.name(7) if each else "unknown" for each in gits))
        raise Error(
            f"{' '.join(names)}: {len(numbers)} undisturbed numbers of revision {of} on {'; '.join(machines)}; "
            "name what is of one revision and one machine, in the top folder of a checkout"
        )
    seconds = int(git(Path(), "log", "-1", "--format=%ct", commit_of(Path(), source.revision)))
    return Line(
        source,
        datetime.fromtimestamp(seconds, timezone.utc).strftime(TIME),
        machines.pop(),
        numbers,
    )


def read_history(
    content: bytes, where: str, tell: Callable[[Error], object]
) -> Iterator[tuple[bytes, Line | None]]:
    """Yield the lines of a history, and what they say: None of a broken one, of which `tell` is told."""
    for i, text in enumerate(content.splitlines(), 1):
        try:
            line = decode(Line, parse_json(text, f"{where}:{i}"), f"{where}:{i}")
            if not all(
                each.keys() >= NEEDED and isinstance(each["value"], float) for each in line.numbers
            ):
                raise Error(f"{where}:{i}: a number lacks one of {', '.join(sorted(NEEDED))}")
            yield text, line
        except Error as error:
            tell(error)
            yield text, None


def added(content: bytes, line: Line, where: str, tell: Callable[[str], object]) -> bytes:
    """Return a history with the line at its end: its numbers, and others of this revision and machine."""
    lines = list(read_history(content, where, lambda error: tell(f"{error}; the line is kept")))
    if lines and not any(old for _, old in lines):
        raise Error(f"{where}: no line of it is of a history; name another file")
    same = {
        text: x
        for text, x in lines
        if x is not None and (x.git, x.machine) == (line.git, line.machine)
    }
    every = [number for each in (*same.values(), line) for number in each.numbers]
    last = {name_of(number): number for number in every}
    if len(last) < len(every):
        tell(f"replaced: {len(every) - len(last)} numbers of {line.git.name(7)} on {line.machine}")
    whole = msgspec.json.encode(replace(line, numbers=[*last.values()]))
    return b"".join(
        text + b"\n" for text in [*(text for text, _ in lines if text not in same), whole]
    )


def name_of(number: Number) -> str:
    """Name a number. Within a line, names differ."""
    fields = [
        number.get(x, "threads") for x in ("metric", "kind", "name", "scale", "device", "engine")
    ]
    return ", ".join(
        [f"{number['experiment']} {number['row']}", *(str(x) for x in fields if x != "threads")]
    )


def smaller_is_better(line: Line) -> list[dict[str, Json]]:
    """Return what github-action-benchmark takes as `customSmallerIsBetter`: no speed-ups."""
    return [
        {
            "name": name_of(each),
            "unit": each["unit"],
            "value": each["value"],
            "extra": line.machine,
            "range": "{lower:g}-{upper:g}".format(**each) if "lower" in each else "",
        }
        for each in line.numbers
        if each["unit"] == "count" or better(each["metric"]) == "lower"
    ]
