"""Read a picture of a schedule, so that tests are written as pictures; `torchgpipe.schedules.texts` says how."""

import re
from collections.abc import Sequence

from torchgpipe.schedules import Schedule
from torchgpipe.schedules.action import LETTERS, Action


def pictured(
    picture: str, placement: Sequence[int] | None = None, name: str = "picture"
) -> Schedule:
    """Return the schedule of a picture. A row may do without its heading; each has one stage by default."""
    rows = [row.rpartition("|")[2].split() for row in picture.strip().splitlines()]
    placement = range(len(rows)) if placement is None else placement
    lists: list[list[Action]] = []
    for d, row in enumerate(rows):
        own = [s for s, device in enumerate(placement) if device == d]
        read = [re.fullmatch(r"([RBIW]?)(\d+)([a-z]?)", entry) for entry in row if entry != "."]
        assert all(read), row
        lists.append(
            [
                Action(LETTERS[e[1] or "F"], int(e[2]), own[ord(e[3] or "a") - ord("a")])
                for e in read
                if e
            ]
        )
    return Schedule(name, placement, lists)
