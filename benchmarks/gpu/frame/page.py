"""Make the page that says what the parts found, from the files that they wrote."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from benchmarks.gpu.frame.processes import Outcome
from benchmarks.gpu.part import MOST_LINES, RESULT, Fields, Part
from reproduce.machine.clocks import GpuState

ABOUT = "command.json"
OUTCOME = "outcome.json"
TITLE = "# What the GPU told"


def page(folder: Path, parts: Mapping[str, Part]) -> str:
    """Return the page of a folder with results.

    With nine parts, it has at most 40 lines: four at the top, and four for each part.

    Args:
        folder: The folder that `run_parts` wrote.
        parts: The modules of the parts, by name. Each of them says what its own result means.
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
    """Return the line about the whole command: when, how long, and how the GPUs were clocked."""
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
    """Say how the first GPU was clocked before and after all parts, and what slowed any GPU."""
    states = [outcome.gpus for outcome in outcomes.values() if outcome.gpus]
    if not before:
        return "Clocks are not known, because nvidia-smi does not tell"
    after = states[-1] if states else before
    reasons: list[str] = []
    for name, outcome in outcomes.items():
        for gpu in outcome.gpus:
            reasons += [f"{reason} after {name}" for reason in gpu.slowed_by]
    slowed = ", ".join(dict.fromkeys(reasons)) or "nothing"
    first, last = _state(before[0]), _state(after[0])
    return f"GPU {before[0].index} ran at {first} before and at {last} after; slowed by {slowed}"


def _state(gpu: GpuState) -> str:
    return f"{_known(gpu.clock)} MHz and {_known(gpu.temperature)} °C"


def _known(number: float | None) -> str:
    return "?" if number is None else f"{number:.0f}"


def _first_line(name: str, part: Part, outcome: Outcome | None) -> str:
    """Return the line with a part's name, how it ended, and what it is for."""
    if outcome is None:
        return f"- **{name}** (not reached): {part.PURPOSE}"
    ended: str = outcome.ended
    if outcome.seconds:
        ended += f", {outcome.seconds:.0f} s"
    reason = f"; {outcome.reason}" if outcome.reason else ""
    return f"- **{name}** ({ended}): {part.PURPOSE}{reason}"


def _found(folder: Path, part: Part) -> list[str]:
    """Return what a part says about its result, in at most `MOST_LINES` lines."""
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
