"""Test that the table in docs/how-it-works.md lists all guards, and what each of them does.

A guard keeps one thing, such as random numbers, the same in a forward and its recomputation. Each
column of the table stands for a method that a guard can override.
"""

import importlib
from pathlib import Path

import pytest

from torchgpipe.task.guards.guard import Guard

from ...behaviours.guarded import FOLDER, GUARDS

ROOT = Path(__file__).resolve().parents[3]
# The columns of the table in docs/how-it-works.md.
MOMENTS = [
    "before_single_pass",
    "before_first_pass",
    "after_first_pass",
    "after_all_forwards",
    "backward_begins",
    "before_recomputation",
    "after_recomputation",
    "before_backward",
    "ended",
]


def rows() -> dict[str, list[str]]:
    """Return the table of guards in docs/how-it-works.md as a dictionary.

    A key is the name of a guard's file without `.py`. A value is the list of the other cells in
    that row of the table.
    """
    page = (ROOT / "docs/how-it-works.md").read_text()
    found = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == len(MOMENTS) + 1 and cells[0].startswith("`"):
            found[cells[0].strip("`").removesuffix(".py")] = cells[1:]
    return found


def guard_of(file: str) -> type[Guard]:
    module = importlib.import_module(f"torchgpipe.task.guards.{file}")
    guards = []
    for value in vars(module).values():
        is_guard = isinstance(value, type) and issubclass(value, Guard)
        if is_guard and value.__module__ == module.__name__:
            guards.append(value)
    (guard,) = guards
    return guard


def test_each_guard_has_a_row() -> None:
    assert rows().keys() == GUARDS


def test_each_moment_of_the_protocol_has_a_column() -> None:
    assert {name for name in vars(Guard) if not name.startswith("_")} == set(MOMENTS)


@pytest.mark.parametrize("file", rows())
def test_a_guard_has_the_moments_of_its_row(file: str) -> None:
    guard = guard_of(file)
    told = [moment for moment, cell in zip(MOMENTS, rows()[file], strict=True) if cell]
    overridden = [m for m in MOMENTS if getattr(guard, m) is not getattr(Guard, m)]
    assert told == overridden


@pytest.mark.parametrize("file", rows())
def test_a_guard_begins_with_what_goes_wrong_without_it_and_says_what_it_costs(file: str) -> None:
    text = (FOLDER / f"{file}.py").read_text()
    begin = text.split('"""')[1]
    assert "What goes wrong without this guard: " in begin
    assert "What it costs: " in begin
