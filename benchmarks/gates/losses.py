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
REVISIONS = "revisions"
"""The setting of a result that maps a git revision to the number of runs with its code."""


def table(record: Record, style: str = "simple") -> str:
    """Render the table: a row for each planted loss of speed, a column for each gate.

    A gate is a check of `regression`, which judges whether a version has become slower. The last
    column names the git revisions whose code was judged.
    """
    columns = (*GATES, CANNOT_TELL)
    rows = []
    for loss, results in by_case(record).items():
        cells = [_times(results.get(name)) for name in columns]
        rows.append([loss, *cells, _revisions(results.get(CANNOT_TELL))])
    return grid(["planted", *columns, "runs of each revision"], rows, style)


def _revisions(result: Result | None) -> str:
    """Return a table cell such as `27 of d17999ae4, 13 of 964eeeb51`."""
    runs = {} if result is None else result.config.get(REVISIONS, {})
    return ", ".join([f"{count} of {revision}" for revision, count in runs.items()])


def _times(result: Result | None) -> str:
    """Return a table cell such as `9 of 10`, if a gate found a planted loss in 9 of its 10 runs.

    The cell is empty if the gate did not run.
    """
    if result is None:
        return ""
    return f"{result.values[FOUND]} of {result.values[RUNS]}"
