"""Tests of the groups of a speed experiment.

A group consists of rows (configurations) that are compared with each other, in one table.
"""

from msgspec.structs import replace

from reproduce.records.record import Result
from reproduce.tables.all import document, tables

from ..made import ran, record

RESULTS = ran("amoebanet-speed", "small", lambda row: [8.0, 4.0])


def without_group(result: Result) -> Result:
    """Return a result as older versions recorded it, without the name of its group."""
    config = dict(result.config)
    del config["group"]
    return replace(result, config=config)


def test_the_recorded_group_decides_which_rows_share_a_table() -> None:
    first, *others = [replace(result, config={**result.config, "group": "a"}) for result in RESULTS]
    first = replace(first, config={**first.config, "group": "b"})

    made = tables(record(first, *others))

    assert [table.group for table in made] == ["b", "a"]
    assert [len(table.rows) for table in made] == [1, len(others)]


def test_results_without_a_group_have_the_same_tables() -> None:
    older = [without_group(result) for result in RESULTS]

    assert document(record(*older)) == document(record(*RESULTS))
    assert len(tables(record(*older))) > 1
