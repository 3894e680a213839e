"""Test that docs/schedules.md shows each schedule as the code makes it."""

from textwrap import indent

import pytest

from reproduce.machine.description import ROOT
from torchgpipe.schedules import make
from torchgpipe.schedules.named import NAMED


def seconds(name: str, n: int, m: int) -> float:
    """Return the seconds of a step of a schedule.

    The forward of one micro-batch through all stages of a device takes 1 s.
    """
    made = make(name, n, m)
    stages_on_each = len(made.placement) / n
    return made.replay().seconds / stages_on_each


@pytest.mark.parametrize("name", NAMED)
def test_the_page_shows_what_is_drawn(name: str) -> None:
    page = (ROOT / "docs" / "schedules.md").read_text()
    made = make(name, 3, 6)
    assert indent(str(made), "    ") in page

    replayed = made.replay()
    kept = ", ".join(map(str, made.in_flight))
    cells = [name, f"{replayed.bubble_of_longest:.0%}", f"{replayed.bubble:.0%}", kept]
    for n, m in ((4, 2), (4, 5), (8, 12), (4, 16)):
        ratio = seconds(name, n, m) / seconds("1F1B", n, m)
        cells.append(f"{ratio:.2f}")
    row = " | ".join(cells)
    assert f"| {row} |" in page
