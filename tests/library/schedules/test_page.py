"""The page on schedules shows what the lists are."""

from textwrap import indent

import pytest

from reproduce.machine.description import ROOT
from torchgpipe.schedules import make
from torchgpipe.schedules.named import NAMED


@pytest.mark.parametrize("name", NAMED)
def test_the_page_shows_what_is_drawn(name: str) -> None:
    page, made = (ROOT / "docs" / "schedules.md").read_text(), make(name, 3, 6)
    assert indent(str(made), "    ") in page
    replayed, kept = made.replay(), ", ".join(map(str, made.in_flight))

    def seconds(name: str, n: int, m: int) -> float:
        made = make(name, n, m)
        return (
            made.replay().seconds * n / len(made.placement)
        )  # two stages on a device are each half as large

    times = [
        f"{seconds(name, *each) / seconds('1F1B', *each):.2f}"
        for each in ((4, 2), (4, 5), (8, 12), (4, 16))
    ]
    cells = [name, f"{replayed.bubble_of_longest:.0%}", f"{replayed.bubble:.0%}", kept, *times]
    assert f"| {' | '.join(cells)} |" in page
