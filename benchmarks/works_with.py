"""Render the tables of docs/works-with.md.

The tables say which PyTorch tools work with a pipeline, and which checks of training pass. The
table of tools is made from `TOOLS`, a list of rows (cases) of this library's tests. The tables of
checks are made from the record that `benchmarks.conformance` writes.
"""

from benchmarks import conformance
from benchmarks.harness import section
from reproduce.records.record import Record
from reproduce.tables.layout import grid
from tests.behaviours.row import MODES, Row
from tests.behaviours.rows import between, buffers, gradients, passed, random, tools, unusual

ENGINES = ("graph", "workers")
TOOLS = list(tools.ROWS)
for group in (passed, gradients, buffers, between, random, unusual):
    TOOLS += [row for row in group.ROWS if row.note]
TOOLS += tools.REPLICAS


def table(record: Record, style: str) -> str:
    """Render a table of how often each engine was right, one of all tools, and one of all checks.

    Args:
        record: The record of `benchmarks.conformance`.
        style: The style of the tables, such as "pipe" for Markdown.
    """
    rows = []
    notes = []
    for row in TOOLS:
        rows.append([row.name, *(answer(row, engine) for engine in ENGINES)])
        rounded = "The results are equal up to rounding. " if row.tolerance else ""
        if rounded or row.note:
            notes.append(f"**{row.name}**: {rounded}{row.note}".strip())
    tools_of_torch = grid(["", *ENGINES], rows, style)
    return "\n\n".join(
        [
            conformance.counted(record, style),
            section("tools of PyTorch", tools_of_torch, notes, style),
            conformance.checked(record, style),
        ]
    )


def answer(row: Row, engine: str) -> str:
    """Say with which checkpoint modes a tool of PyTorch works on an engine of `GPipe`."""
    right = [mode for mode in MODES if not row.refusal(engine, mode)]
    if not right:
        return "refused"
    return "right" if len(right) == len(MODES) else f"only {', '.join(right)}"
