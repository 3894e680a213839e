"""Compare results, and write the comparison, for the command `python -m reproduce compare`.

The command compares two or more *sides*. A side is a record (a file of results), a folder of
records, or the records of a git revision. This module loads the sides, compares them, and writes
the comparison as text, Markdown, CSV or JSON.
"""

import string
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import NamedTuple

from reproduce.error import Error
from reproduce.numbers.compare import Asked, ComparedRow, Comparison, compare, verdict
from reproduce.numbers.gate import Gate, gate
from reproduce.numbers.match import grouped, match, pick
from reproduce.numbers.metrics import BYTES, available, better, outcome
from reproduce.numbers.notes import IN_TURN
from reproduce.numbers.significance import Decision, Rule
from reproduce.numbers.sources import Entry, Side, load_side
from reproduce.records.record import RULE, SUCCESS, Record, Run
from reproduce.tables.layout import Table, bullets, many, reading_text
from reproduce.tables.output import Number, of_reading, written

LABEL_WIDTH = 30  # longer names of rows are wrapped
NO_ROWS = "no row has numbers on two sides"
Sides = Sequence[Side]
Comparisons = Sequence[Comparison]


class Options(NamedTuple):
    """The options of the command `python -m reproduce compare`.

    Attributes:
        metric: The metric to compare, such as "throughput". None stands for the first of the usual
            metrics that two sides have.
        filters: Texts such as "n=2,4", which means that only rows with n = 2 or n = 4 are compared.
        alpha: The level of significance of the statistical test of each row.
        threshold: The smallest relative difference that counts: 0.05 is 5 %.
        style: The format of the output: "text", "markdown", "csv" or "json".
        force: Whether absolute numbers are compared even if they come from different machines, or
            from different work.
        every: Whether notes name all rows that only one side has. If not, notes give their number.
    """

    metric: str | None
    filters: Sequence[str]
    alpha: float
    threshold: float
    style: str
    force: bool
    every: bool


def compared(names: Sequence[str], options: Options) -> tuple[str, Gate]:
    """Compare two or more sides, such as two records (files of results).

    Return the comparison as a text, and what it shows about regressions.

    Args:
        names: The names of the sides: paths, names of records, or git revisions.
        options: The options of the command.

    Raises:
        Error: A side cannot be read, no row has the metric, or a filter names a field that no row
            has.
    """
    metric = options.metric
    rule = Rule(options.alpha, options.threshold)
    sides = []
    for letter, name in zip(string.ascii_uppercase, names, strict=False):
        sides.append(load_side(letter, name))
    matched = match(sides)
    lines = pick(matched, options.filters)
    entries: list[Entry] = []
    for line in lines:
        entries += line.entries.values()
    metrics = available(entries)
    if metric is not None and metric not in metrics:
        known = ", ".join(metrics) or "none"
        raise Error(
            f"--metric {metric}: no row of the records has this metric; they have the metrics "
            f"{known}"
        )
    every = options.every or options.style == "json"
    asked = Asked(sides, rule, options.force, every)
    comparisons, notes = compare(asked, lines, metric, among=matched)
    found = gate(sides, lines, comparisons, rule.threshold, metric)
    first, *others = sides
    alike = [side.letter for side in others if side.records == first.records]
    if alike:
        letters = " and ".join(alike)
        same = f"A and {letters} hold the same records"
        ran = any(record.run is not None for record in first.records)
        if ran:
            same += f", of the same runs; {IN_TURN}"
        notes.insert(0, same)
        # A run is no evidence about itself. But predictions of the same code are equal.
        if ran and len(alike) == len(others):
            found = Gate([], set(), set(), unjudged={}, unfair=[same])
    return write_comparisons(comparisons, sides, rule, notes, options.style), found


def write_comparisons(
    comparisons: Comparisons, sides: Sides, rule: Rule, notes: Sequence[str], style: str
) -> str:
    """Return comparisons as a text, with a legend and notes.

    Args:
        comparisons: The comparisons: one for each experiment.
        sides: The sides that were compared, such as two runs.
        rule: When a difference counts: the level of significance, and the threshold.
        notes: Further notes.
        style: The format: "text", "markdown", "csv" or "json".
    """
    below = [*_legend(sides, rule), *notes]
    text = []
    markdown = []
    numbers: list[Number] = []
    own_notes = []
    for comparison in comparisons:
        table = _table(comparison, sides)
        text.append(table.text())
        markdown.append(table.markdown().rstrip())
        numbers += _numbers(comparison, sides)
        own_notes += comparison.notes
    text = text or [NO_ROWS]
    markdown = markdown or [NO_ROWS]
    text.append(bullets(below))
    markdown.append(bullets(below, wrap=False))
    return written(
        style,
        numbers,
        "\n\n".join(text) + "\n",
        "\n\n".join(markdown) + "\n",
        sides={side.letter: side.name for side in sides},
        alpha=rule.alpha,
        threshold=rule.threshold,
        notes=own_notes + below,
    )


def _legend(sides: Sides, rule: Rule) -> Iterator[str]:
    """Yield the legend of a comparison, line by line.

    The lines say which side (such as a run) each letter stands for, and what the verdicts mean.
    """
    for side in sides:
        for note in _about(side):
            yield f"{side.letter}: {note}"
    percent = f"{100 * rule.threshold:.3g} %"
    confidence = f"{100 * (1 - rule.alpha):.3g} %"
    yield (
        f"better, worse: significant (rank test, p <= {rule.alpha:g}) and more than {percent} "
        f"apart; ~: not both; interval: the ratio's, at {confidence}"
    )


def _about(side: Side) -> Iterator[str]:
    """Yield lines that say which records (files of results) a side of the comparison has."""
    yield f"{side.name} ({many(len(side.records), 'record')}, {_origins(side)})"
    if side.superseded:
        yield f"{many(side.superseded, 'row')} of other runs left out: {RULE}"
    of_experiments = grouped(side.entries, lambda entry: entry.result.experiment)
    for experiment, entries in of_experiments.items():
        runs = {entry.record.name for entry in entries if entry.record.run}
        if len(runs) > 1:
            names = ", ".join(sorted(runs))
            yield f"{experiment}: rows of {len(runs)} runs, not in turn: {names}"
    unfinished = []
    for record in side.records:
        run = record.run
        if run is not None and run.state != "finished":
            unfinished.append(record.name)
    if unfinished:
        yield f"not finished: {', '.join(unfinished)}"


def _table(comparison: Comparison, sides: Sides) -> Table:
    """Return the table of a comparison: a line for each row, and a column for each side.

    A row is a measured configuration. A side is, for example, a run. If there are two sides,
    further columns show the ratio of the second side to the first. If there are more sides, the
    cell of a side's number also shows the ratio to the first side.
    """
    headings = ["row", *(side.letter for side in sides)]
    if len(sides) == 2:
        base, head = sides
        headings += [f"{head.letter}/{base.letter}", "interval", "verdict"]
    rows = []
    for row in comparison.rows:
        label = row.line.label
        wrapped = "\n".join(textwrap.wrap(label, LABEL_WIDTH))
        numbers = [_number(row, side) for side in range(len(sides))]
        ratios = [_ratio(decision, comparison.metric) for decision in row.decisions[1:]]
        rows.append(_line(wrapped or label, numbers, ratios))
    rows.append(_mean_line(comparison, sides))
    title = f"{comparison.experiment}: {comparison.metric}"
    if comparison.relative:
        title += ", each side over its own"
    elif comparison.unit not in ("", *BYTES):
        title += f" in {comparison.unit}"
    way = better(comparison.metric)
    if way is not None:
        title += f"; {way} is better"
    return Table(title, headings, rows, comparison.notes)


def _mean_line(comparison: Comparison, sides: Sides) -> list[str]:
    """Return the last line of a comparison's table: the mean ratio of each side to the first side.

    A side is, for example, a run. Its mean is the geometric mean of its ratios over all rows.
    """
    counts = set()
    ratios = []
    for side in range(1, len(sides)):
        ratio = ""
        mean = comparison.mean(side)
        if mean is not None:
            ratio = f"{mean[0]:.2f}"
            counts.add(mean[1])
        ratios.append([ratio, "", ""])
    label = "geometric mean"
    if counts:
        label += " of " + " or ".join(map(str, sorted(counts)))
    if comparison.together is not None:
        ratios = [_ratio(comparison.together, comparison.metric)]
    return _line(label, [""] * len(sides), ratios)


def _line(label: str, numbers: Sequence[str], ratios: Sequence[Sequence[str]]) -> list[str]:
    """Return the cells of one line of the comparison's table.

    Args:
        label: The text of the first cell, such as the name of the row.
        numbers: The number of each side, as a text.
        ratios: Three texts for each side but the first one: the ratio of this side to the first
            side, the confidence interval of the ratio, and the verdict.
    """
    if len(numbers) == 2:
        return [label, *numbers, *ratios[0]]
    first, *others = numbers
    cells = [label, first]
    for number, (ratio, interval, found) in zip(others, ratios, strict=True):
        times = f"x {ratio}" if ratio else ""
        cells.append("\n".join(filter(None, [number, times, interval, found])))
    return cells


def _numbers(comparison: Comparison, sides: Sides) -> Iterator[Number]:
    """Yield the numbers of a comparison for CSV and JSON, each as a dictionary of fields.

    First come the numbers of each row, one for each side (such as a run). Then come the means.
    """

    def line(row: str, side: Side, decision: Decision | None) -> Number:
        found: Number = {"row": row, "side": side.letter, "name": side.name}
        found["experiment"] = comparison.experiment
        found["metric"] = comparison.metric
        found["relative"] = comparison.relative
        if decision is not None:
            found |= asdict(decision)
            found["verdict"] = verdict(decision, comparison.metric)
        return found

    for row in comparison.rows:
        entries = row.line.entries
        for i, side in enumerate(sides):
            reading = row.readings[i]
            result = entries[i].result if i in entries else None
            reason = _number(row, i).replace("\n", " ") if reading is None else None
            own = line(row.line.label, side, row.decisions[i])
            yield {**own, **of_reading(reading, result), "reason": reason}
    for i, side in enumerate(sides):
        mean = comparison.mean(i) if i else None
        if mean is not None:
            own = line("geometric mean", side, comparison.together)
            yield {**own, "ratio": mean[0]}


def _number(row: ComparedRow, side: int) -> str:
    """Return a cell's text: the number of a side (such as a run) for a row, or why it has none."""
    reading = row.readings[side]
    entry = row.line.entries.get(side)
    if reading is not None:
        return reading_text(reading)
    if entry is None:
        return "missing"
    if entry.result.status in SUCCESS:
        return "-"
    return outcome(entry.result).replace(" ", "\n", 1)


def _ratio(decision: Decision | None, metric: str) -> list[str]:
    """Return three cells of a row: the ratio of two numbers, its interval, and the verdict on it.

    Args:
        decision: What the statistical test decides about the ratio, or None if there is no ratio.
        metric: The name of the metric.
    """
    if decision is None:
        return ["", "", ""]
    interval = ""
    if decision.low is not None and decision.high is not None:
        interval = f"{decision.low:.2f}-{decision.high:.2f}"
    text: str = verdict(decision, metric)
    if text == "too few":
        text = f"too few;\nneeds {decision.needed}"
    elif text == "untested":
        text = "no samples"
    elif text == "base differs":
        text = "base\ndiffers"
    return [f"{decision.ratio:.2f}", interval, text]


def _origins(side: Side) -> str:
    """Return a short text that says where the numbers of one side (such as a run) come from."""
    origins: dict[str, None] = {}
    for record in side.records:
        origin: str = record.kind
        if record.run is not None:
            origin = _origin(record, record.run)
        origins[origin] = None
    return "; ".join(origins) or "no row"


def _origin(record: Record, run: Run) -> str:
    """Return how and where a run was measured, such as `measured on CPU NAME, git 414bf55`."""
    done: dict[str, None] = {}
    for result in record.results:
        done["emulated" if result.emulated else "measured"] = None
    place = run.machine.cpu
    if run.device == "cuda":
        gpus = {gpu.name for gpu in run.machine.gpus}
        place = ", ".join(gpus) or place
    origin = f"{' and '.join(done) or record.kind} on {place}"
    if run.git is not None:
        origin += f", git {run.git.name(7)}"
    return origin
