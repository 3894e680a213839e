"""Decide whether a comparison may pass as a check that nothing has become worse.

A comparison has sides, such as two runs. Some rows (configurations) of the first side, A, cannot be
judged, for example because another side lacks them. Such a row could hide a regression. So the
check fails or, if the user accepts such rows, names them.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass

from reproduce.error import CLOSEST, MOST_LISTED, Error, Worse
from reproduce.numbers.baseline import CHANGED
from reproduce.numbers.compare import ComparedRow, Comparison, Verdict, verdict
from reproduce.numbers.match import Line
from reproduce.numbers.metrics import available, read
from reproduce.numbers.notes import count, once, problem_of
from reproduce.numbers.significance import TOO_WIDE, Decision, by_threshold
from reproduce.numbers.sources import Side
from reproduce.numbers.unmatched import unmatched
from reproduce.records.record import SUCCESS

# Why a decision is no verdict.
UNJUDGED = {
    "too few": "too few samples ({side}/A; needs {needed})",
    "untested": "no samples ({side}/A)",
    "disturbed": "disturbed ({side}/A)",
    "base differs": "divided by a row that itself differs in {side}",
}
TOO_NOISY = f"too noisy ({{side}}/A: the ends of the interval differ {TOO_WIDE:g}-fold or more)"
NO_DIRECTION = "differs, and it is not known whether higher is better ({side}/A)"
ACCEPT = "--allow-missing accepts this"


@dataclass(frozen=True)
class Gate:
    """What a comparison shows about regressions.

    Attributes:
        worse: The names of the rows that are worse than on the first side, A.
        judged_metrics: The metrics in which at least one row could be judged, such as throughput.
        unjudged_metrics: The metrics in which at least one row of A could not be judged.
        unjudged: The rows of A that could not be judged. The keys are the reasons, and the values
            are the names of the rows.
        unfair: Why absolute numbers were not compared: at most one reason for each experiment.
    """

    worse: list[str]
    judged_metrics: Set[str]
    unjudged_metrics: Set[str]
    unjudged: dict[str, list[str]]
    unfair: list[str]

    def check(self, *, allow_missing: bool) -> str:
        """Check that nothing is worse; return a remark for the user, which may be empty.

        Args:
            allow_missing: Whether to accept that some rows could not be judged, if other rows could
                be judged in the same metric.

        Raises:
            Worse: A row is worse than on the first side, A.
            Error: No row could be judged; or, without `allow_missing`, a row of the first side
                could not be judged; or, with `allow_missing`, no row of a metric could be judged.
        """
        left = set().union(*self.unjudged.values())
        reasons = [f"{reason}: {_first(names)}" for reason, names in self.unjudged.items()]
        said = list(dict.fromkeys(self.unfair))
        if self.worse:
            more = f"; {count(left)} of A could not be judged" if left else ""
            raise Worse(f"{count(self.worse)} worse than in A: {once(self.worse)}{more}")
        if not self.judged_metrics:
            because = "; ".join(["", *said, *reasons]).replace("; ", ": ", 1)
            raise Error(
                f"no row could be judged, so it is not known whether there is a regression{because}"
            )
        unknown = sorted(self.unjudged_metrics - self.judged_metrics)
        if unknown and allow_missing:
            raise Error(
                f"no {' and no '.join(unknown)} could be judged, so it is not known whether there "
                f"is a regression: {'; '.join([*said, *reasons])}; to judge only one metric, give "
                "--metric NAME"
            )
        if left:
            said.append(f"{count(left)} of A could not be judged: {'; '.join(reasons)}")
        if left and not allow_missing:
            raise Error("; ".join([*said, ACCEPT]))
        return "; ".join(said)


def _first(names: Sequence[str]) -> str:
    """Join names by commas, each name once. Shorten a long list to its first names."""
    different = list(dict.fromkeys(names))
    if len(different) <= MOST_LISTED:
        return ", ".join(different)
    first = ", ".join(different[:CLOSEST])
    return f"{first} and {len(different) - CLOSEST} more (--all names them)"


def gate(
    sides: Sequence[Side],
    lines: Sequence[Line],
    comparisons: Sequence[Comparison],
    threshold: float,
    metric: str | None = None,
) -> Gate:
    """Return what a comparison shows about regressions.

    Args:
        sides: The sides that were compared, such as two runs.
        lines: The lines, each with matching rows (configurations) of the sides. A line may be in no
            table.
        comparisons: The tables of the comparison: at most one for each experiment.
        threshold: The smallest relative difference that matters.
        metric: The metric that the user has chosen, or None. Then each experiment has the first
            metric that its rows have.
    """
    tables = {comparison.experiment: comparison for comparison in comparisons}
    rows = _rows_by_line(comparisons)
    fields = {}
    for pair in unmatched(lines, len(sides)):
        fields[id(pair.line), pair.side] = pair.text
    worse: dict[str, None] = {}
    judged_metrics: set[str] = set()
    unjudged_metrics: set[str] = set()
    unjudged: dict[str, list[str]] = {}
    for line in lines:
        table = tables.get(line.experiment)
        row_metric = _metric_of(line, table, metric)
        if row_metric is None:
            continue
        name = f"{line.label} ({line.experiment})"
        for number, side in enumerate(sides[1:], 1):
            found = rows.get(id(line))
            called = None if found is None else _verdict(found, number, row_metric, threshold)
            if called is not None:
                judged_metrics.add(row_metric)
                if called == "worse":
                    worse[name] = None
                continue
            field = fields.get((id(line), number))
            reason = _reason(line, number, side.letter, table, found)
            if reason is not None and field is not None:
                reason = f"A and {side.letter} differ in {field}"
            if reason is not None:
                unjudged_metrics.add(row_metric)
                unjudged.setdefault(reason, []).append(name)
    unfair = [comparison.unfair for comparison in comparisons if comparison.unfair]
    return Gate(list(worse), judged_metrics, unjudged_metrics, unjudged, unfair)


def _rows_by_line(comparisons: Sequence[Comparison]) -> dict[int, ComparedRow]:
    """Return a dictionary from the id of each line to its row in the tables of the comparison."""
    rows = {}
    for comparison in comparisons:
        for row in comparison.rows:
            rows[id(row.line)] = row
    return rows


def _metric_of(line: Line, table: Comparison | None, metric: str | None) -> str | None:
    """Return the metric in which the row of side A is judged, or None if A's row has none.

    Args:
        line: The line with the matching rows of all sides.
        table: The table of the line's experiment, if there is one.
        metric: The metric that the user wants to compare, if there is one.
    """
    if table is not None:
        return table.metric
    ours = line.entries.get(0)
    if ours is None:
        return None
    if metric is not None:
        return None if read(ours, metric) is None else metric
    return next(iter(available([ours])), None)


def _verdict(row: ComparedRow, side: int, metric: str, threshold: float) -> Verdict | None:
    """Return the verdict on one side of a row, or None if the row cannot be judged.

    If no difference was found although the interval of the ratio is wide, a regression may be
    hidden by noise. If it is not known whether higher values are better, a difference may be a
    regression.
    """
    decision = row.decisions[side]
    if decision is None:
        return None
    if decision.outcome == "untested":
        decision = _without_samples(decision, threshold, row, side)
    called = verdict(decision, metric)
    is_clear = decision.outcome not in UNJUDGED and not decision.is_too_noisy
    return called if is_clear and called != "differs" else None


def _without_samples(decision: Decision, threshold: float, row: ComparedRow, side: int) -> Decision:
    """Decide by the threshold alone whether two numbers without samples differ.

    Bytes and predictions are the same in two runs of the same code, so any difference counts. Other
    numbers, such as the bubble of one measured step, have noise. If these differ by more than the
    threshold, nothing is decided.
    """
    decided = by_threshold(decision, threshold)
    first, other = row.line.entries[0], row.line.entries[side]
    predicted = first.result.status == other.result.status == "predicted"
    reading = row.readings[side]
    counted = reading is not None and reading.unit == "bytes"
    return decided if decided.outcome == "~" or predicted or counted else decision


def _reason(
    line: Line, side: int, letter: str, table: Comparison | None, row: ComparedRow | None
) -> str | None:
    """Return why the comparison could not judge a side (such as a run) in one line of its table.

    Return None if there is nothing to judge: if side A has no number, or if the line is a baseline.

    Args:
        line: The line.
        side: The index of the side.
        letter: The letter of the side in tables, such as B.
        table: The table of the line's experiment, if there is one.
        row: The line's row in this table, if there is one.
    """
    ours = line.entries.get(0)
    if ours is None or ours.result.status not in SUCCESS:
        return None
    decision = None if row is None else row.decisions[side]
    if decision is not None:
        reason = NO_DIRECTION if decision.outcome in CHANGED else TOO_NOISY
        reason = UNJUDGED.get(decision.outcome, reason)
        return reason.format(side=letter, needed=decision.needed)
    theirs = line.entries.get(side)
    if theirs is None or theirs.result.status not in SUCCESS:
        return f"{problem_of(theirs)} in {letter}"
    if table is None:
        return f"no number of the same metric in {letter}"
    if read(ours, table.metric) is None or (row is not None and row.is_base):
        return None
    has_number = row is not None and row.readings[side] is not None
    return f"no ratio ({letter}/A)" if has_number else f"no number in {letter}"
