"""Read a schedule from a text picture, so that tests can show schedules as pictures.

`torchgpipe.schedules.texts` describes the format of a picture.
"""

import re
from collections.abc import Sequence

from torchgpipe.schedules import Schedule
from torchgpipe.schedules.action import LETTERS, Action

ENTRY = re.compile(r"([RBIW]?)(\d+)([a-z]?)")


def pictured(
    picture: str, placement: Sequence[int] | None = None, name: str = "picture"
) -> Schedule:
    """Return the schedule that a picture shows. The heading of a row may be left out.

    By default each row is a device with one stage.
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
