"""Make the table of planted losses of speed.

A planted loss is a change of the library that makes it slower on purpose. The table says in how
many runs each gate (check) of `regression` found it. `tests/planted/losses.py` plants the losses,
and writes the record.
"""

from benchmarks.harness import by_case
from reproduce.records.record import Record, Result
from reproduce.tables.layout import grid

GATES = ("counts", "meeting", "times")
"""The gates of `regression`."""
CANNOT_TELL = "cannot tell"
"""The name of the results that count the runs in which `regression` could not judge."""
FOUND, RUNS = "found", "runs"
"""The values of a result: in how many runs something was found, and how many runs there were."""


def table(record: Record, style: str = "simple") -> str:
    """Render the table: a row for each planted loss of speed, a column for each gate.

    A gate is a check of `regression`, which judges whether a version has become slower.
    """
    columns = (*GATES, CANNOT_TELL)
    rows = []
    for loss, results in by_case(record).items():
        cells = [_times(results.get(name)) for name in columns]
        rows.append([loss, *cells])
    return grid(["planted", *columns], rows, style)


def _times(result: Result | None) -> str:
    """Return a table cell such as `9 of 10`, if a gate found a planted loss in 9 of its 10 runs.

    The cell is empty if the gate did not run.
    """
    if result is None:
        return ""
    return f"{result.values[FOUND]} of {result.values[RUNS]}"
