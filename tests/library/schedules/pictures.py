"""Read schedules from text pictures, whose format `torchgpipe.schedules.texts` describes."""

import re
from collections.abc import Sequence

from torchgpipe.schedules import Schedule
from torchgpipe.schedules.action import LETTERS, Action

ENTRY = re.compile(r"([RBIW]?)(\d+)([a-z]?)")


def pictured(
    picture: str, placement: Sequence[int] | None = None, name: str = "picture"
) -> Schedule:
    """Return the schedule that a text picture shows.

    Args:
        picture: The text. It has a line for each device, which may begin with a heading.
        placement: The index of the device of each stage. By default, each device has one stage.
        name: The name for the schedule.
    """
    rows = picture.strip().splitlines()
    placement = range(len(rows)) if placement is None else placement
    lists = []
    for d, row in enumerate(rows):
        stages = [s for s, device in enumerate(placement) if device == d]
        actions = []
        _, _, entries = row.rpartition("|")
        for entry in entries.split():
            if entry == ".":
                continue
            read = ENTRY.fullmatch(entry)
            assert read, row
            letter, micro_batch, stage_letter = read.groups()
            nth = ord(stage_letter or "a") - ord("a")
            action = Action(LETTERS[letter or "F"], int(micro_batch), stages[nth])
            actions.append(action)
        lists.append(actions)
    return Schedule(name, placement, lists)
