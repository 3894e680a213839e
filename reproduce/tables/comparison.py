"""Answer `python -m reproduce compare`: find the sides, compare them, and write it as text, Markdown, CSV or JSON."""

import string
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from reproduce.error import Error, Worse
from reproduce.numbers.compare import IN_TURN, ComparedRow, Comparison, compare, verdict
from reproduce.numbers.match import grouped, match, pick
from reproduce.numbers.metrics import BYTES, available, better, outcome
from reproduce.numbers.significance import Decision, Rule
from reproduce.numbers.sources import Side, load_side
from reproduce.records.places import Json
from reproduce.records.record import RULE, SUCCESS
from reproduce.tables.layout import Table, bullets, many, reading_text
from reproduce.tables.output import Number, of_reading, written

LABEL_WIDTH = 30  # longer names of rows are wrapped


def compared(
    names: Sequence[str],
    *,
    metric: str | None,
    filters: Sequence[str],
    alpha: float,
    threshold: float,
    style: str,
    force: bool,
    every: bool,
) -> tuple[str, Error | None]:
    """Return the comparison as text, and what to raise, if it fails as a check for regressions.

    The arguments are those of the command. It raises `Error` if a side cannot be read, or has no such metric or field.
    """
    rule = Rule(alpha, threshold)
    sides = [
        load_side(letter, name) for letter, name in zip(string.ascii_uppercase, names, strict=False)
    ]
    matched = match(sides)
    lines = pick(matched, filters)
    metrics = available([entry for line in lines for entry in line.entries.values()])
    if metric is not None and metric not in metrics:
        raise Error(f"--metric {metric}: no row has it; there are {', '.join(metrics) or 'none'}")
    alike = [side.letter for side in sides[1:] if side.records == sides[0].records]
    every |= style == "json"
    comparisons, notes = compare(
        sides, lines, metric=metric, rule=rule, force=force, every=every, among=matched
    )
    if alike:
        notes.insert(
            0, f"A and {' and '.join(alike)} hold the same records, of the same runs; {IN_TURN}"
        )
    complaint = _complaint(comparisons) if len(alike) < len(sides) - 1 else Error(f"{notes[0]}")
    return write_comparisons(comparisons, sides, rule, notes, style), complaint


def write_comparisons(
    comparisons: Sequence[Comparison],
    sides: Sequence[Side],
    rule: Rule,
    notes: Sequence[str],
    style: str,
) -> str:
    """Format comparisons and notes as 'text', 'markdown', 'csv' or 'json'."""
    tables = [_table(comparison, sides) for comparison in comparisons]
    below = [*_legend(sides, rule), *notes]
    pages = [[each.text() for each in tables], [each.markdown().rstrip() for each in tables]]
    text, markdown = (
        "\n\n".join(
            [*(page or ["no row has numbers on two sides"]), bullets(below, page is pages[0])]
        )
        + "\n"
        for page in pages
    )
    said = [*(note for each in comparisons for note in each.notes), *below]
    numbers = (found for each in comparisons for found in _numbers(each, sides))
    named = {side.letter: side.name for side in sides}
    more = {"sides": named, "alpha": rule.alpha, "threshold": rule.threshold, "notes": said}
    return written(style, numbers, text, markdown, **more)


def _complaint(comparisons: Sequence[Comparison]) -> Error | None:
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
        return Worse(f"{many(len(worse), 'row')} worse than in A: {', '.join(worse)}")
    if all(found in ("too few", "untested", "disturbed") for _, found in verdicts):
        return Error("no row could be decided, so nothing shows that there is no regression")
    return None


def _legend(sides: Sequence[Side], rule: Rule) -> Iterator[str]:
    """Explain the letters and the verdicts."""
    for side in sides:
        yield f"{side.letter}: {side.name} ({many(len(side.records), 'record')}, {_origin(side)})"
        if side.superseded:
            yield f"{side.letter}: {many(side.superseded, 'row')} of other runs left out: {RULE}"
        for experiment, entries in grouped(
            side.entries, lambda each: each.result.experiment
        ).items():
            if len(runs := {each.record.name for each in entries if each.record.run}) > 1:
                yield f"{side.letter}: {experiment}: rows of {len(runs)} runs, not in turn: {', '.join(sorted(runs))}"
        unfinished = [
            record.name for record in side.records if record.run and record.run.state != "finished"
        ]
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
    unit = "" if comparison.unit in ("", *BYTES) else f" in {comparison.unit}"
    of = ", each side over its own" if comparison.relative else unit
    way = better(comparison.metric)
    title = f"{comparison.experiment}: {comparison.metric}{of}" + (
        f"; {way} is better" if way else ""
    )
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


def _numbers(comparison: Comparison, sides: Sequence[Side]) -> Iterator[Number]:
    """Yield a line for each row and side, and one for each side's geometric mean."""

    def line(row: str, i: int, decision: Decision | None, **found: Json) -> Number:
        tested = (
            {}
            if decision is None
            else {**asdict(decision), "verdict": verdict(decision, comparison.metric)}
        )
        about = {name: getattr(comparison, name) for name in ("experiment", "metric", "relative")}
        return {
            "row": row,
            "side": sides[i].letter,
            "name": sides[i].name,
            **about,
            **tested,
            **found,
        }

    for row in comparison.rows:
        for i, (reading, decision) in enumerate(zip(row.readings, row.decisions, strict=True)):
            found = of_reading(
                reading, row.line.entries[i].result if i in row.line.entries else None
            )
            reason = None if reading else _number(row, i).replace("\n", " ")
            yield line(row.line.label, i, decision, **found, reason=reason)
    for i in range(1, len(sides)):
        if (mean := comparison.mean(i)) is not None:
            yield line("geometric mean", i, comparison.together, ratio=mean[0])


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
    between = (
        ""
        if decision.low is None or decision.high is None
        else f"{decision.low:.2f}-{decision.high:.2f}"
    )
    means = verdict(decision, metric)
    text = {"too few": f"too few;\nneeds {decision.needed}", "untested": "no samples"}.get(
        means, means
    )
    return [f"{decision.ratio:.2f}", between, text]


def _origin(side: Side) -> str:
    """Say in short where a side's numbers come from."""
    origins: dict[str, None] = {}
    for record in side.records:
        origin: str = record.kind
        if record.run is not None:
            git, machine = record.run.git, record.run.machine
            gpus = (
                ", ".join({gpu.name for gpu in machine.gpus}) if record.run.device == "cuda" else ""
            )
            done = dict.fromkeys(
                "emulated" if each.emulated else "measured" for each in record.results
            )
            origin = f"{' and '.join(done) or record.kind} on {gpus or machine.cpu}"
            origin += f", git {git.name(7)}" if git else ""
        origins[origin] = None
    return "; ".join(origins) or "no row"
