"""Tests of the tables of an interrupted run.

The tables must say that the run was interrupted, and how many steps of each row (configuration)
were measured.
"""

import pytest

from reproduce.experiments.row import Row
from reproduce.records.record import Record
from reproduce.tables.all import INTERRUPTED, NOT_ENDED, written_records

from ..made import one_line, ran, record


def one_step(row: Row) -> list[float]:
    return [50.0]


def two_steps(row: Row) -> list[float]:
    return [50.0, 50.0]


def made(state: str) -> Record:
    """Make a record of a run in a given state, such as "interrupted".

    Measured rows (configurations) were timed for one training step, and emulated rows for two. So
    the tests can check that both numbers are shown.
    """
    measured = ran("amoebanet-speed", "paper", one_step)
    emulated = ran("amoebanet-speed", "paper", two_steps, emulated=True)
    return record(*measured, *emulated, state=state)


@pytest.mark.parametrize("style", ["text", "markdown"])
@pytest.mark.parametrize("state", ["interrupted", "running", "finished"])
def test_a_table_says_that_its_run_was_interrupted(state: str, style: str) -> None:
    """Check the notes about runs that did not finish. A run that was killed is still "running"."""
    written = one_line(written_records([made(state)], style))

    assert (INTERRUPTED in written) == (state == "interrupted")
    assert (NOT_ENDED in written) == (state == "running")


def test_steps_of_measured_rows_count_beside_emulated_ones() -> None:
    assert "1 to 2 steps per row" in one_line(written_records([made("interrupted")], "text"))
