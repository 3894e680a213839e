"""Render the table of docs/works-with.md.

The table says which PyTorch tools work with a pipeline, and which checks of training pass. Whether
a tool works comes from this library's tests (`TOOLS`). Whether a check passes comes from the record
that `benchmarks.conformance` writes.
"""

from itertools import product

from benchmarks import conformance
from reproduce.records.record import Record
from tests.behaviours.row import MODES, Row
from tests.behaviours.rows import between, buffers, gradients, passed, random, tools, unusual

ENGINES = ("graph", "workers")
TOOLS = list(tools.ROWS)
for group in (passed, gradients, buffers, between, random, unusual):
    TOOLS += [row for row in group.ROWS if row.note]
TOOLS += tools.REPLICAS


def table(record: Record, style: str) -> str:
    """Render how often each engine had each outcome, and a table of all tools and checks."""
    heading = ["**tools of PyTorch**", "", "", ""]
    lines = [[row.name, answer(row), row.note, ""] for row in TOOLS]
    return conformance.table(record, style, [heading, *lines])


def answer(row: Row) -> str:
    """Say with which engines and checkpoint modes of `GPipe` a tool works."""
    right = []
    for engine, mode in product(ENGINES, MODES):
        if not row.refusal(engine, mode):
            right.append((engine, mode))
    rounded = ", up to rounding" if row.tolerance else ""
    if len(right) == len(ENGINES) * len(MODES):
        return f"right{rounded}"
    if not right:
        return "refused"
    engines, modes = zip(*right, strict=True)
    engine, mode = engines[0], min(modes)
    assert len(set(engines)) == 1, f"{row.name}: there are no words for this"
    only = "" if len(modes) == len(MODES) else f' and `checkpoint="{mode}"`'
    return f'right with `engine="{engine}"`{only}{rounded}'
