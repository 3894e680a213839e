"""Test that no number on a page of the docs is out of date.

A number with a unit may be in a block that a program generates. Each other number with a unit must
be listed in `SETTINGS`, together with the constant or default in the code which it has to equal.
"""

import re
from pathlib import Path

import pytest
from torch.distributed.constants import default_pg_timeout

from benchmarks.names import pages
from benchmarks.others.processes import PATIENCE
from reproduce.cli.main import COMMANDS
from reproduce.machine.description import ROOT
from reproduce.machine.load import LIMITS
from reproduce.regression.judge import WALL
from reproduce.run.groups import LARGEST_SHARE
from reproduce.run.timed import SAMPLING_SECONDS
from torchgpipe.distributed.liveness.idle import HARDLY
from torchgpipe.plan.predict.predict import DEARER

FIGURE = re.compile(
    r"(?<![\w.,])(\d+(?:\.\d+)?)\s*(%|(?:ms|s|seconds?|minutes?|min|hours?|times|[KMGT]i?B)\b)"
)
MADE = re.compile(r"<!-- from \w+: .*?<!-- end -->|```.*?```|`[^`]*`", re.DOTALL)
"""Blocks that are made from records or docstrings, and code."""
# The page of schedules has a table that another test compares with the code.
ELSEWHERE = "schedules.md"


def default(command: str, option: str) -> float:
    """Return the default value of an option of a command of `reproduce`."""
    (found,) = [each for each in COMMANDS if each.name == command]
    (value,) = [each.default for each in found.params if each.name == option]
    assert isinstance(value, float)
    return value


# For each page: the numbers with units in its text, and the value in the code that each number
# must equal. The value is None if the number is not in the code.
SETTINGS: dict[str, list[tuple[str, float | None]]] = {
    "accuracy.md": [("0.1 times", None)],
    "league.md": [  # the targets that predictions have, and the heading of a column
        ("10%", None),
        ("10%", None),
        ("15%", None),
        ("5%", None),
        ("10%", None),
    ],
    "measured.md": [("40 %", LARGEST_SHARE), ("0.05 s", SAMPLING_SECONDS)],
    "prediction.md": [
        ("100 %", None),
        ("5%", None),  # a tolerance of a test
        ("5 %", DEARER - 1),
    ],
    "processes.md": [
        ("30 min", default_pg_timeout.total_seconds() / 60),
        ("2 %", HARDLY),
    ],
    "regression.md": [
        ("2 %", default("regression", "threshold")),
        ("5 %", default("regression", "threshold") * WALL),
        ("10 %", default("regression", "also_threshold")),
        ("10 %", LIMITS["others"]),
        ("2 %", LIMITS["stolen"]),
        ("2.5 times", WALL),
        ("3 %", None),  # of the example `--slow-down 0.03`
    ],
    "results.md": [
        ("5 %", default("compare", "threshold")),
        ("2 %", default("regression", "threshold")),
    ],
    "which.md": [  # the sizes by which makers name their GPUs; descriptions have the exact sizes
        ("24 GB", None),
        ("48 GB", None),
        ("80 GB", None),
        ("24 GB", None),
        ("80 GB", None),
        ("48\n  GB", None),
    ],
    "works-with.md": [("12 seconds", PATIENCE.total_seconds())],
}
PAGES = [page for page in pages(ROOT) if page.name != ELSEWHERE]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_figure_is_a_setting(page: Path) -> None:
    text = MADE.sub("", page.read_text(encoding="utf-8"))
    settings = SETTINGS.get(page.name, [])
    found = [match[0] for match in FIGURE.finditer(text)]
    assert found == [figure for figure, _ in settings]
    for figure, setting in settings:
        match = FIGURE.fullmatch(figure)
        assert match is not None
        number = float(match[1]) / (100 if match[2] == "%" else 1)
        assert setting is None or setting == pytest.approx(number)
