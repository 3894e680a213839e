"""The table of docs/works-with.md: PyTorch's tools combined with a pipeline, and the checks of what training needs.

The tools are rows of this library's tests (`TOOLS`); the checks are in the record of `benchmarks.conformance`.
"""

from benchmarks import conformance
from reproduce.records.record import Record
from tests.behaviours.row import MODES, Row
from tests.behaviours.rows import between, buffers, gradients, passed, random, tools, unusual

ENGINES = ("graph", "workers")
TOOLS = [
    *tools.ROWS,
    *(
        row
        for group in (passed, gradients, buffers, between, random, unusual)
        for row in group.ROWS
        if row.note
    ),
    *tools.REPLICAS,
]


def table(record: Record, style: str) -> str:
    """Render a count of results per engine, and one table of all tools and checks."""
    heading = ["**tools of PyTorch**", "", "", ""]
    return conformance.table(
        record, style, [heading, *([row.name, answer(row), row.note, ""] for row in TOOLS)]
    )


def answer(row: Row) -> str:
    """Say with which engines and modes of `GPipe` a row works."""
    right = [
        (engine, mode) for engine in ENGINES for mode in MODES if row.refusal(engine, mode) is None
    ]
    rounded = ", up to rounding" if row.tolerance else ""
    if len(right) == len(ENGINES) * len(MODES):
        return f"right{rounded}"
    if not right:
        return "refused"
    engines, modes = sorted({engine for engine, _ in right}), sorted({mode for _, mode in right})
    assert len(right) == len(modes) and len(engines) == 1, (
        f"{row.name}: there are no words for this"
    )
    only = "" if len(modes) == len(MODES) else f' and `checkpoint="{modes[0]}"`'
    return f'right with `engine="{engines[0]}"`{only}{rounded}'
