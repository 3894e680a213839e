"""Make the page that sums up the results of all parts (measurements), from the parts' files."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from benchmarks.gpu.frame.processes import Outcome
from benchmarks.gpu.frame.watch import Watched
from benchmarks.gpu.part import MOST_LINES, RESULT, Fields, Part
from reproduce.machine.clocks import GpuState

ABOUT = "command.json"
OUTCOME = "outcome.json"
TITLE = "# What the GPU told"


def page(folder: Path, parts: Mapping[str, Part]) -> str:
    """Return the text of the page that sums up the results in a folder.

    With nine parts, the page has at most 40 lines: four at the top, and four for each part.

    Args:
        folder: The folder with results that `run_parts` wrote.
        parts: Maps the name of each part (measurement) to its module. The module's function `lines`
            puts the result into words.
    """
    about: Fields = json.loads((folder / ABOUT).read_text())
    outcomes: dict[str, Outcome] = {}
    for name in about["parts"]:
        path = folder / name / OUTCOME
        if path.exists():
            outcomes[name] = msgspec.json.decode(path.read_bytes(), type=Outcome)
    lines = [TITLE, "", _top(about, outcomes), ""]
    for name in about["parts"]:
        lines.append(_first_line(name, parts[name], outcomes.get(name)))
        lines += [f"  - {line}" for line in _found(folder / name, parts[name])]
    return "\n".join(lines) + "\n"


def _top(about: Fields, outcomes: Mapping[str, Outcome]) -> str:
    """Return the page's line about the command: its start, its time limit, and GPU clock rates."""
    beside = about["against"]
    words = [
        f"Started {about['started']}",
        f"at most {about['seconds']:.0f} s",
        f"size `{about['size']}`",
        f"beside {beside}" if beside else "beside no other torchgpipe",
    ]
    before = msgspec.convert(about["gpus"], list[GpuState])
    return f"{', '.join(words)}. {_clocks(before, outcomes)}."


def _clocks(before: Sequence[GpuState], outcomes: Mapping[str, Outcome]) -> str:
    """Say how fast the first GPU ran before and during all parts, and what slowed down any GPU."""
    if not before:
        return "Clocks are not known, because there is no driver for GPUs"
    first, *_ = before
    seen = []
    slowed = []
    tells = False
    for name, outcome in outcomes.items():
        seen += [gpu for gpu in outcome.gpus if gpu.index == first.index and gpu.busy]
        for gpu in outcome.gpus:
            tells |= gpu.slowed_by is not None
            for reason, count in (gpu.slowed_by or {}).items():
                slowed.append(f"{reason} in {name} ({count} of {gpu.busy} looks)")
    nothing = "nothing" if tells else "what the driver does not tell"
    return (
        f"GPU {first.index} ran at {_known(first.clock)} MHz and {_known(first.temperature)} °C "
        f"before{_during(seen)}; slowed by {', '.join(slowed) or nothing}"
    )


def _during(seen: Sequence[Watched]) -> str:
    """Say a GPU's lowest and highest clock rate and its highest temperature during all parts."""
    if not seen:
        return ""
    rates: list[float] = []
    temperatures: list[float] = []
    for gpu in seen:
        rates += gpu.clock or ()
        if gpu.temperature is not None:
            temperatures.append(gpu.temperature)
    lowest, highest = min(rates, default=None), max(rates, default=None)
    hottest = max(temperatures, default=None)
    return (
        f", at {_known(lowest)} to {_known(highest)} MHz and at most {_known(hottest)} °C while "
        "it was not idle"
    )


def _known(number: float | None) -> str:
    return "?" if number is None else f"{number:.0f}"


def _first_line(name: str, part: Part, outcome: Outcome | None) -> str:
    """Return a line with the name of a part (a measurement), how it ended, and what it is for."""
    if outcome is None:
        return f"- **{name}** (not reached): {part.PURPOSE}"
    ended: str = outcome.ended
    if outcome.seconds:
        ended += f", {outcome.seconds:.0f} s"
    reason = f"; {outcome.reason}" if outcome.reason else ""
    return f"- **{name}** ({ended}): {part.PURPOSE}{reason}"


def _found(folder: Path, part: Part) -> list[str]:
    """Return at most `MOST_LINES` lines of text about the saved result of a part (measurement)."""
    path = folder / RESULT
    if not path.exists():
        return []
    try:
        lines = part.lines(json.loads(path.read_text()))
    except Exception as error:  # an early result may lack what the lines are made of
        kind = type(error).__name__
        return [f"{folder.name}/{RESULT} cannot be shown in words ({kind}: {error})"]
    if len(lines) > MOST_LINES:
        lines = [*lines[: MOST_LINES - 1], f"more is in {folder.name}/{RESULT}"]
    return [" ".join(line.split()) for line in lines]  # a message of an error can have line breaks
