"""Tests of the tables of emulated runs.

One column shows the speed if a single thread of the host issues (submits) the tasks of all GPUs.
"""

from reproduce.experiments.row import Row
from reproduce.tables.all import tables

from ..made import ran, record


def as_fast(row: Row) -> list[float]:
    return [40.0, 50.0, 60.0]


def halved(row: Row) -> float:
    """Return the made-up seconds of a step if one thread of the host issues all tasks.

    With these seconds, the speed is 25 samples/s. This is half of 50 samples/s, the median that
    `as_fast` returns.
    """
    return row.batch_size / 25.0


def test_a_column_says_which_share_of_the_speed_one_thread_leaves() -> None:
    """Check the column for the speed if one thread of the host issues (submits) all tasks.

    The column shows this speed as a share of the usual speed. The table of utilization has the
    column only if results have the value `one_thread_time`.
    """
    values = {"bubble": 0.5, "utilization": [0.5]}
    for more in ({}, {"one_thread_time": halved}):
        made = ran("unet-speed", "paper", as_fast, "cuda", emulated=True, **values, **more)
        *_, busy = tables(record(*made))
        assert busy.group == "utilization"
        notes = " ".join(busy.notes)
        assert ("with one\nthread" in busy.headings) == bool(more)
        assert ("one thread of the host issues the tasks of all GPUs" in notes) == bool(more)
    assert {cells[-1] for cells in busy.rows} == {"50%"}


def test_a_note_has_the_measured_samples_per_second_of_emulated_rows() -> None:
    """Check that measured samples/s are in a note below the table of emulated samples/s.

    There is no room for another column, because a line of a table has at most 80 characters.
    """
    emulated = ran("unet-speed", "small", as_fast, emulated=True)
    measured = ran("unet-speed", "small", lambda row: [30.0] if row.name == "baseline" else None)
    published, *_ = tables(record(*emulated, *measured))
    assert "samples/s measured: baseline 30.0" in published.notes
    alone, *_ = tables(record(*emulated))
    assert not any("samples/s measured" in note for note in alone.notes)


def test_a_note_has_rows_that_were_measured_but_not_emulated() -> None:
    """Check that a measured row is in a note if the table, which has emulated rows, lacks it.

    For example, `--emulate 4` emulates no row with 8 partitions, and a machine with 8 GPUs measures
    these rows.
    """
    every = ran("unet-speed", "small", as_fast, emulated=True)
    emulated = [result for result in every if result.row != "pipeline-8"]
    measured = ran("unet-speed", "small", lambda row: [30.0] if row.name == "pipeline-8" else None)
    published, *_ = tables(record(*emulated, *measured))
    note = "samples/s of rows that were measured, but not emulated: pipeline-8 30.0"
    assert note in published.notes
    assert not any("samples/s measured" in note for note in published.notes)
    complete, *_ = tables(record(*every, *measured))
    assert not any("not emulated" in note for note in complete.notes)
