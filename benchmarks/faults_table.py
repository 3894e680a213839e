"""The tables of `benchmarks.faults`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from benchmarks.faults_cases import FAULTS, PHASES, RANKS, SLOW, Cell
from benchmarks.harness import by_case, render
from reproduce.records.record import Record, Result

TORCHRUN = "under torchrun"
EXAMPLE = "forward", 2, 0  # of what other ranks say: the phase, the victim, and who says it


def table(record: Record, style: str = "simple") -> str:
    """Render the matrix, what cannot be, what was not as it has to be, what others say, and who was only slow."""
    cases = by_case(record)
    rows, missing, said, slow = [], [], [], []
    for fault in FAULTS:
        row = [fault]
        for phase in PHASES:
            reasons = [Cell(fault, phase, victim).why_not() for victim in range(RANKS)]
            missing += [[fault, phase, reason] for reason in dict.fromkeys(filter(None, reasons))]
            row.append("-" if all(reasons) else cell([*cases.get(f"{fault}: {phase}", {}).values()]))
        rows.append(row)
        phase, victim, other = EXAMPLE
        if (example := cases.get(f"{fault}: {phase}", {}).get(f"rank {victim}")) is not None:
            said.append([fault, text(example.values.get(f"rank {other}", ""), 400)])
    for fault, phases in SLOW.items():
        for phase in phases:
            results = cases.get(f"{fault}: {phase}", {}).values()
            slow.append([fault, phase, f"{sum(each.status == 'measured' for each in results)} of {len(results)}"])
    failed = [
        [each.experiment, each.row, text(each.reason or "", 300)] for each in record.results if each.status == "failed"
    ]
    torchrun = [
        [fault, *(str(result.values[key]) for key in ("ended after", "blames"))]
        for fault, result in cases.get(TORCHRUN, {}).items()
    ]
    tables = [
        render(["fault", *PHASES], rows, style),
        render(["fault", "phase", "what cannot be"], missing, style),
        render(["case", "rank", "what is wrong"], failed, style) if failed else "",
        render(["fault", f"what rank {EXAMPLE[2]} says of rank {EXAMPLE[1]} in {EXAMPLE[0]}"], said, style),
        render(["what is only slow", "in", "ranks of which nobody was convicted"], slow, style),
        render(["rank 2 of torchrun, in forward", "torchrun ends after, s", "it blames"], torchrun, style)
        if torchrun
        else "",
    ]
    return "\n\n".join(filter(None, tables))


def cell(results: Sequence[Result]) -> str:
    """Return the most seconds after which another rank ended, whichever the victim was; or how many cases failed."""
    done = [each for each in results if each.status != "not run"]
    if failed := sum(each.status == "failed" for each in done):
        return f"**{failed} of {len(done)} fail**"
    return f"{max(each.values['last'] for each in done):.1f}" if done else "not run"


def text(said: object, most: int) -> str:
    """Return a text for a cell of a table."""
    short = re.sub(r"\btorchgpipe\.[\w.]+\.", "", str(said)).replace("|", "\\|").replace("<", "&lt;")
    return short if len(short) <= most else f"{short[: most - 1]}…"
