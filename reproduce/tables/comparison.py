"""Render comparisons: a table for a terminal or as Markdown, CSV, JSON."""

from __future__ import annotations

import csv
import io
import json
import textwrap
from collections.abc import Sequence

from reproduce.numbers.judge import Comparison, Row, verdict
from reproduce.numbers.metric import BYTES, Reading, better
from reproduce.numbers.significance import Decision, Rule
from reproduce.numbers.sources import Side
from reproduce.records.decode import Json
from reproduce.tables.layout import Table, many

__all__ = ["as_csv", "as_json", "legend", "number", "table", "three_digits"]

LABEL_WIDTH = 30  # of a row's name, before it is broken
MiB, GiB = BYTES["MiB"], BYTES["GiB"]


def legend(sides: Sequence[Side], rule: Rule) -> list[str]:
    """Return what the letters stand for, and what the verdicts mean."""
    lines = []
    for side in sides:
        lines.append(f"{side.letter}: {side.name} ({many(len(side.records), 'record')}, {_origin(side)})")
        if side.superseded:
            lines.append(f"{side.letter}: {many(side.superseded, 'row')} left out, as newer runs have them, too")
        unfinished = [record.name for record in side.records if record.run and record.run.state != "finished"]
        if unfinished:
            lines.append(f"{side.letter}: not finished: {', '.join(unfinished)}")
    lines.append(
        f"better, worse: significant (rank test, p <= {rule.alpha:g}) and more than "
        f"{100 * rule.threshold:.3g} % apart; ~: not both; interval: the ratio's, at {100 * (1 - rule.alpha):.3g} %"
    )
    return lines


def table(comparison: Comparison, sides: Sequence[Side]) -> Table:
    """Return the table: wide for two sides, and with a side's ratio below its number for more."""
    wide = len(sides) == 2
    headings = ["row", *(side.letter for side in sides)]
    if wide:
        headings += [f"{sides[1].letter}/{sides[0].letter}", "interval", "verdict"]
    rows = []
    for row in comparison.rows:
        cells = [_cell(row, number) for number in range(len(sides))]
        if wide:
            cells += _ratio(row.decisions[1], comparison.metric)
        else:
            cells[1:] = [
                "\n".join(filter(None, [cell, _stacked(decision, comparison.metric)]))
                for cell, decision in zip(cells[1:], row.decisions[1:], strict=True)
            ]
        rows.append([_wrapped(row.line.label), *cells])
    rows.append(_mean(comparison, len(sides), wide))
    metric = f"{comparison.metric}, each side over its own" if comparison.relative else comparison.metric
    way = better(comparison.metric)
    unit = "" if comparison.relative else f" in {_unit(comparison)}" if _unit(comparison) else ""
    title = f"{comparison.experiment}: {metric}{unit}" + (f"; {way} is better" if way else "")
    return Table(title, headings, rows, comparison.notes)


def as_csv(comparisons: Sequence[Comparison], sides: Sequence[Side]) -> str:
    """Return a line for each row and side, with everything unrounded."""
    records = [record for comparison in comparisons for record in _flat(comparison, sides)]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def as_json(comparisons: Sequence[Comparison], sides: Sequence[Side], notes: Sequence[str], rule: Rule) -> str:
    """Return everything as one JSON object."""
    tables = [
        {
            "experiment": comparison.experiment,
            "metric": comparison.metric,
            "unit": comparison.unit,
            "relative": comparison.relative,
            "rows": list(_flat(comparison, sides)),
            "geometric_mean": {
                side.letter: mean[0] for i, side in enumerate(sides) if (mean := comparison.mean(i)) is not None
            },
            "notes": comparison.notes,
        }
        for comparison in comparisons
    ]
    data = {
        "sides": {side.letter: side.name for side in sides},
        "alpha": rule.alpha,
        "threshold": rule.threshold,
        "tables": tables,
        "notes": list(notes),
    }
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


FIELDS = ("experiment", "row", "metric", "unit", "relative", "side", "name", "value", "samples", "ratio", "low", "high",
          "p", "verdict", "needed")  # fmt: skip


def _flat(comparison: Comparison, sides: Sequence[Side]) -> Sequence[dict[str, Json]]:
    found = []
    for row in comparison.rows:
        for side, reading, decision in zip(sides, row.readings, row.decisions, strict=True):
            line = dict.fromkeys(FIELDS)
            line.update(experiment=comparison.experiment, row=row.line.label, metric=comparison.metric,
                        side=side.letter, relative=comparison.relative, name=side.name)  # fmt: skip
            if reading is not None:
                line.update(value=reading.middle, samples=reading.samples, unit=reading.unit)
            if decision is not None:
                line.update(_decided(decision, comparison.metric))
            found.append(line)
    if comparison.together is not None:
        line = dict.fromkeys(FIELDS)
        line.update(experiment=comparison.experiment, row="geometric mean", metric=comparison.metric,
                    side=sides[1].letter, relative=comparison.relative, name=sides[1].name,
                    **_decided(comparison.together, comparison.metric))  # fmt: skip
        found.append(line)
    return found


def _decided(decision: Decision, metric: str) -> dict[str, Json]:
    return {"ratio": decision.ratio, "low": decision.low, "high": decision.high, "p": decision.p,
            "needed": decision.needed, "verdict": verdict(decision, metric)}  # fmt: skip


def _cell(row: Row, side: int) -> str:
    reading = row.readings[side]
    if reading is not None:
        return number(reading)
    if side not in row.line.entries:
        return "missing"
    result = row.line.entries[side].result
    if result.status in ("measured", "published", "predicted"):
        return "-"
    return (result.reason if result.status == "needs devices" and result.reason else result.status).replace(
        " ", "\n", 1
    )


def number(reading: Reading) -> str:
    """Write a reading's middle with three digits, bytes as MiB or GiB."""
    value = reading.middle
    if reading.unit in BYTES:
        value *= BYTES[reading.unit]
        return f"{value / GiB:.2f} GiB" if value >= GiB else f"{value / MiB:.4g} MiB"
    return three_digits(value)


def three_digits(value: float) -> str:
    """Write a number with three digits, or all that stand before the point."""
    if 999.5 <= abs(value) < 1e13:
        return f"{value:,.0f}"
    if value == 0 or 1e-3 <= abs(value) < 1e13:
        return f"{value:#.3g}".rstrip(".") if value else "0"
    return f"{value:.2e}"


def _ratio(decision: Decision | None, metric: str) -> list[str]:
    if decision is None:
        return ["", "", ""]
    between = "" if decision.low is None or decision.high is None else f"{decision.low:.2f}-{decision.high:.2f}"
    return [f"{decision.ratio:.2f}", between, _verdict(decision, metric)]


def _verdict(decision: Decision, metric: str) -> str:
    said = verdict(decision, metric)
    if said == "too few":
        return f"too few;\nneeds {decision.needed}"
    return "no samples" if said == "untested" else said


def _stacked(decision: Decision | None, metric: str) -> str:
    ratio, between, said = _ratio(decision, metric)
    return "\n".join(filter(None, [ratio and f"x {ratio}", between, said]))


def _mean(comparison: Comparison, sides: int, wide: bool) -> list[str]:
    cells = []
    for side in range(1, sides):
        mean = comparison.mean(side)
        cells.append("" if mean is None else f"{mean[0]:.2f}" if wide else f"x {mean[0]:.2f}")
    counts = {mean[1] for side in range(1, sides) if (mean := comparison.mean(side)) is not None}
    label = f"geometric mean of {' or '.join(map(str, sorted(counts)))}" if counts else "geometric mean"
    if not wide:
        return [label, "", *cells]
    if comparison.together is not None:
        return [label, "", "", *_ratio(comparison.together, comparison.metric)]
    return [label, "", "", *cells, "", ""]


def _unit(comparison: Comparison) -> str:
    return "" if comparison.unit in BYTES else comparison.unit


def _wrapped(label: str) -> str:
    return "\n".join(textwrap.wrap(label, LABEL_WIDTH)) or label


def _origin(side: Side) -> str:
    """Say shortly where a side's numbers come from."""
    said: dict[str, None] = {}
    for record in side.records:
        if record.run is None:
            said[record.kind] = None
        else:
            git = record.run.git
            gpus = {gpu.name for gpu in record.run.machine.gpus}
            where = ", ".join(gpus) if gpus and record.run.device == "cuda" else record.run.machine.cpu
            said[
                f"{record.kind} on {where}" + (f", git {git.revision[:7]}{'+' if git.dirty else ''}" if git else "")
            ] = None
    return "; ".join(said) or "no row"
