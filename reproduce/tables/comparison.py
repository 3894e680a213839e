"""Answer `python -m reproduce compare`: find the sides, compare them, and write it as text, Markdown, CSV or JSON."""

import csv
import io
import json
import string
import textwrap
from collections.abc import Iterator, Sequence

from reproduce.error import USAGE, Error
from reproduce.numbers.compare import ComparedRow, Comparison, compare, verdict
from reproduce.numbers.match import match, pick, values_of
from reproduce.numbers.metrics import BYTES, Reading, available, better, outcome
from reproduce.numbers.significance import Decision, Rule
from reproduce.numbers.sources import Side, load_side
from reproduce.records.places import Json
from reproduce.records.record import SUCCESS
from reproduce.tables.layout import Table, bullets, many, reading_text
from reproduce.tables.pivot import pivot

LABEL_WIDTH = 30  # longer names of rows are wrapped
FIELDS = ("experiment", "row", "metric", "unit", "relative", "side", "name", "value", "samples", "ratio", "low", "high",
          "p", "verdict", "needed")  # fmt: skip


def compared(
    names: Sequence[str], *, metric: str | None, filters: Sequence[str], down: Sequence[str], across: Sequence[str],
    alpha: float, threshold: float, style: str, force: bool, every: bool,
) -> tuple[str, str | None]:  # fmt: skip
    """Return the comparison as text, and why it fails as a check for regressions, or None.

    `down` and `across` are the fields of a grid, or empty. The other arguments are the command's options.

    Raises:
        Error: a side cannot be found or is broken, or there is no such metric, field or row.
    """
    rule = Rule(alpha, threshold)
    sides = [load_side(letter, name) for letter, name in zip(string.ascii_uppercase, names, strict=False)]
    lines = pick(match(sides), filters)
    metrics = available([entry for line in lines for entry in line.entries.values()])
    if metric is not None and metric not in metrics:
        raise Error(f"--metric {metric}: no row has it; there are {', '.join(metrics) or 'none'}", USAGE)
    for option, fields in (("--row", down), ("--col", across)):
        for field in fields:
            values_of(field, lines, f"{option} {field}")
    comparisons, notes = compare(sides, lines, metric=metric, rule=rule, force=force, every=every or style == "json")
    grids = [grid for each in comparisons for grid in pivot(each, sides, down, across)] if down else None
    return write_comparisons(comparisons, sides, rule, notes, style, grids), _complaint(comparisons)


def write_comparisons(
    comparisons: Sequence[Comparison], sides: Sequence[Side], rule: Rule, notes: Sequence[str], style: str,
    grids: Sequence[Table] | None = None,
) -> str:  # fmt: skip
    """Format comparisons and notes as 'text', 'markdown', 'csv' or 'json'; the first two with `grids`, if given."""
    if style == "csv":
        return _as_csv(comparisons, sides)
    if style == "json":
        return _as_json(comparisons, sides, rule, notes)
    terminal = style == "text"
    tables = [_table(comparison, sides) for comparison in comparisons] if grids is None else grids
    parts = [(each.text() if terminal else each.markdown()).rstrip() for each in tables]
    nothing = "no row has numbers on two sides" if grids is None else "no row has all of the grid's fields"
    return "\n\n".join([*(parts or [nothing]), bullets([*_legend(sides, rule), *notes], wrap=terminal)]) + "\n"


def _complaint(comparisons: Sequence[Comparison]) -> str | None:
    """Say which rows are worse, or that no row could be tested: a check that tested nothing must not pass."""
    verdicts = [
        (f"{row.line.label} ({comparison.experiment})", verdict(decision, comparison.metric))
        for comparison in comparisons
        for row in comparison.rows
        for decision in row.decisions
        if decision is not None
    ]
    worse = dict.fromkeys(row for row, found in verdicts if found == "worse")
    if worse:
        return f"{many(len(worse), 'row')} worse than in A: {', '.join(worse)}"
    if all(found in ("too few", "untested") for _, found in verdicts):
        return "no row could be decided, so nothing shows that there is no regression"
    return None


def _legend(sides: Sequence[Side], rule: Rule) -> Iterator[str]:
    """Explain the letters and the verdicts."""
    for side in sides:
        yield f"{side.letter}: {side.name} ({many(len(side.records), 'record')}, {_origin(side)})"
        if side.superseded:
            yield f"{side.letter}: {many(side.superseded, 'row')} left out, as newer runs have them, too"
        unfinished = [record.name for record in side.records if record.run and record.run.state != "finished"]
        if unfinished:
            yield f"{side.letter}: not finished: {', '.join(unfinished)}"
    yield (
        f"better, worse: significant (rank test, p <= {rule.alpha:g}) and more than "
        f"{100 * rule.threshold:.3g} % apart; ~: not both; interval: the ratio's, at {100 * (1 - rule.alpha):.3g} %"
    )


def _table(comparison: Comparison, sides: Sequence[Side]) -> Table:
    """Return the table. With two sides, ratios have their own columns; with more, they are below each side's number."""
    headings = ["row", *(side.letter for side in sides)]
    if len(sides) == 2:
        headings += [f"{sides[1].letter}/{sides[0].letter}", "interval", "verdict"]
    rows = [
        _line(
            "\n".join(textwrap.wrap(row.line.label, LABEL_WIDTH)) or row.line.label,
            [_number(row, side) for side in range(len(sides))],
            [_ratio(decision, comparison.metric) for decision in row.decisions[1:]],
        )
        for row in comparison.rows
    ]
    means = [comparison.mean(side) for side in range(1, len(sides))]
    counts = sorted({mean[1] for mean in means if mean is not None})
    label = f"geometric mean of {' or '.join(map(str, counts))}" if counts else "geometric mean"
    ratios = [["" if mean is None else f"{mean[0]:.2f}", "", ""] for mean in means]
    if comparison.together is not None:
        ratios = [_ratio(comparison.together, comparison.metric)]
    rows.append(_line(label, [""] * len(sides), ratios))
    unit = "" if comparison.relative or comparison.unit in ("", *BYTES) else f" in {comparison.unit}"
    way = better(comparison.metric)
    title = f"{comparison.experiment}: {comparison.what}{unit}" + (f"; {way} is better" if way else "")
    return Table(title, headings, rows, comparison.notes)


def _line(label: str, numbers: Sequence[str], ratios: Sequence[Sequence[str]]) -> list[str]:
    """Return a row of the table from each side's number, and the ratio cells of each side but the first."""
    first, *others = numbers
    if len(others) == 1:
        return [label, first, *others, *ratios[0]]
    below = [
        "\n".join(filter(None, [number, ratio and f"x {ratio}", *more]))
        for number, (ratio, *more) in zip(others, ratios, strict=True)
    ]
    return [label, first, *below]


def _as_csv(comparisons: Sequence[Comparison], sides: Sequence[Side]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(line for comparison in comparisons for line in _flat(comparison, sides))
    return text.getvalue()


def _as_json(comparisons: Sequence[Comparison], sides: Sequence[Side], rule: Rule, notes: Sequence[str]) -> str:
    tables = [
        {
            **{name: getattr(comparison, name) for name in ("experiment", "metric", "unit", "relative")},
            "rows": _flat(comparison, sides),
            "geometric_mean": {x.letter: m[0] for i, x in enumerate(sides) if (m := comparison.mean(i)) is not None},
            "notes": comparison.notes,
        }
        for comparison in comparisons
    ]
    named = {side.letter: side.name for side in sides}
    data = {"sides": named, "alpha": rule.alpha, "threshold": rule.threshold, "tables": tables, "notes": list(notes)}
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def _flat(comparison: Comparison, sides: Sequence[Side]) -> list[dict[str, Json]]:
    """Return the `FIELDS` of each row and side, with unrounded numbers."""
    lines: list[tuple[str, Side, Reading | None, Decision | None]] = [
        (row.line.label, *each)
        for row in comparison.rows
        for each in zip(sides, row.readings, row.decisions, strict=True)
    ]
    if comparison.together is not None:
        lines.append(("geometric mean", sides[1], None, comparison.together))
    flat = []
    for row, side, reading, decision in lines:
        means = None if decision is None else verdict(decision, comparison.metric)
        said = comparison.experiment, row, comparison.metric, reading and reading.unit, comparison.relative
        value = side.letter, side.name, reading and reading.middle, reading and reading.samples
        test = [decision and getattr(decision, name) for name in ("ratio", "low", "high", "p")]
        flat.append(dict(zip(FIELDS, [*said, *value, *test, means, decision and decision.needed], strict=True)))
    return flat


def _number(row: ComparedRow, side: int) -> str:
    reading, entry = row.readings[side], row.line.entries.get(side)
    if reading is not None:
        return reading_text(reading)
    if entry is None:
        return "missing"
    return "-" if entry.result.status in SUCCESS else outcome(entry.result).replace(" ", "\n", 1)


def _ratio(decision: Decision | None, metric: str) -> list[str]:
    """Return the cells of a ratio, its interval and its verdict."""
    if decision is None:
        return ["", "", ""]
    between = "" if decision.low is None or decision.high is None else f"{decision.low:.2f}-{decision.high:.2f}"
    means = verdict(decision, metric)
    text = {"too few": f"too few;\nneeds {decision.needed}", "untested": "no samples"}.get(means, means)
    return [f"{decision.ratio:.2f}", between, text]


def _origin(side: Side) -> str:
    """Say in short where a side's numbers come from."""
    origins: dict[str, None] = {}
    for record in side.records:
        origin: str = record.kind
        if record.run is not None:
            git, machine = record.run.git, record.run.machine
            gpus = ", ".join({gpu.name for gpu in machine.gpus}) if record.run.device == "cuda" else ""
            done = dict.fromkeys("emulated" if each.emulated else "measured" for each in record.results)
            origin = f"{' and '.join(done) or record.kind} on {gpus or machine.cpu}"
            origin += f", git {git.revision[:7]}{'+' if git.dirty else ''}" if git else ""
        origins[origin] = None
    return "; ".join(origins) or "no row"
