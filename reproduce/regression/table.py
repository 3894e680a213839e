"""Write the results of `python -m reproduce regression`: a table, its notes, and the verdict."""

import math
import statistics
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain

from reproduce.numbers.compare import verdict
from reproduce.numbers.metrics import Reading
from reproduce.numbers.significance import Decision
from reproduce.regression.job import Samples, Settings
from reproduce.regression.judge import (
    METRIC,
    OLDS,
    TOGETHER,
    WALL,
    WALL_TOGETHER,
    Judgement,
    Limits,
    Old,
    families,
)
from reproduce.regression.trees import Tree, Trees
from reproduce.tables.layout import WIDTH, Table, by_value, many, number
from reproduce.tables.output import Number, of_reading, written

LABEL_WIDTH = 22  # longer names of cases are wrapped
LETTERS: dict[str, str] = {"base": "A", "head": "B", "also": "C"}
GROUPS = {TOGETHER: "by CPU time", WALL_TOGETHER: "by wall clock"}


@dataclass(frozen=True)
class Report:
    """The results that `python -m reproduce regression` writes.

    Attributes:
        judged: The samples, and what was decided from them.
        versions: The versions that were compared.
        settings: What was measured, and for how long.
        limits: What counts as slower.
        machine: The name of the processor.
        conclusion: The verdict in words.
    """

    judged: Judgement
    versions: Trees
    settings: Settings
    limits: Limits
    machine: str
    conclusion: str

    def text(self, style: str) -> str:
        """Return the report as "text" or "markdown" (a table), or as "csv" or "json" (numbers)."""
        table = self._table()
        text = f"{table.text()}\n\n{textwrap.fill(self.conclusion, WIDTH)}\n"
        markdown = f"{table.markdown()}\n\n**{self.conclusion}**\n"
        return written(
            style,
            self._numbers(),
            text,
            markdown,
            sides={letter: tree.name for letter, tree in self._sides()},
            alpha=self.limits.alpha,
            threshold=self.limits.threshold,
            notes=list(table.notes),
            conclusion=self.conclusion,
        )

    def _sides(self) -> Iterator[tuple[str, Tree]]:
        for letter, tree in zip(LETTERS.values(), self.versions, strict=True):
            if tree is not None:
                yield letter, tree

    def _table(self) -> Table:
        headings = ["row", "A", "B", "B/A", "interval", "verdict"]
        if self.versions.also is not None:
            headings += ["B/C", "verdict"]
        width = len(headings)
        gaps = [""] * (width - 6)
        rows = [[gate.name, *[""] * 4, gate.verdict, *gaps] for gate in self.judged.gates]
        clocks = {case: samples.clock for case, samples in self.judged.samples.items()}
        for together, cases in families(clocks).items():
            rows.append([GROUPS[together], *[""] * (width - 1)])
            rows += [self._line(case, self.judged.samples[case]) for case in cases]
            decided = self.judged.decisions["base"]
            if together in decided:
                count = len(decided.keys() & set(cases))
                rows.append(self._cells(f"geometric mean of {count}", together, ["", ""]))
        title = "regression: time in ms; lower is better"
        if self.settings.slow_down:
            title += f", WITH A PLANTED DELAY of {self.settings.slow_down:.0%} in each step of B"
        return Table(title, headings, rows, list(self._notes()))

    def _line(self, case: str, samples: Samples) -> list[str]:
        """Return the table's cells for a case (timed work): times, their ratio, and the verdict."""
        decision = self.judged.decisions["base"].get(case)
        unable = samples.unable
        numbers = ["missing" if which in unable else "" for which in ("base", "head")]
        if decision is not None:
            pair = nearest(samples.base, samples.head, decision.ratio)
            numbers = [number(1000 * seconds) for seconds in pair]
        return self._cells(case, case, numbers)

    def _cells(self, label: str, name: str, numbers: Sequence[str]) -> list[str]:
        label = "\n".join(textwrap.wrap(label, LABEL_WIDTH, break_on_hyphens=False))
        decisions = self.judged.decisions
        cells = [label, *numbers, *_ratio(decisions["base"].get(name))]
        if self.versions.also is not None:
            ratio, _, called = _ratio(decisions["also"].get(name))
            cells += [ratio, called]
        return cells

    def _notes(self) -> Iterator[str]:
        """Yield the notes below the table.

        The notes say what the gates (checks that measure no time) have printed, which version each
        letter stands for, and how to read the table.
        """
        for gate in self.judged.gates:
            for line in gate.lines:
                yield f"{gate.name}: {line}"
        for letter, tree in self._sides():
            commit = "" if tree.commit is None else f" (git {tree.commit[:7]}{'+' * tree.dirty})"
            yield f"{letter}: {tree.name}{commit}"
        if self.judged.samples:
            yield self._measured()
            yield self._clocks()
            yield self._rule()
            yield from self._exceptions()

    def _measured(self) -> str:
        restarts = many(self.settings.restarts, "restart")
        pairs = many(self.settings.rounds, "pair")
        return (
            f"measured on {self.machine}: {restarts} of all sides; in each, {pairs} of samples of "
            "every case, in turn; a restart counts as one number, the median ratio of its pairs; A "
            "and B: the pair that is nearest to the ratio"
        )

    def _clocks(self) -> str:
        cpu, wall = "CPU time on one core, which sees no waiting", "wall-clock times on two cores"
        if self.settings.clock is None:
            return f"times are {cpu}; by wall clock, they are {wall}"
        return f"times are {wall if self.settings.clock == 'wall' else cpu}"

    def _rule(self) -> str:
        limits = self.limits
        tests = many(round(limits.alpha / self.judged.alpha), "test")
        beside_c = ""
        if self.versions.also is not None:
            beside_c = f" (beside C {_percent(limits.also)}, and {_percent(WALL * limits.also)})"
        return (
            f"better, worse: significant (rank test) and more than {_percent(limits.threshold)} "
            f"apart, by wall clock {_percent(WALL * limits.threshold)}{beside_c}; ~: not both; the "
            f"risk of calling noise significant, {limits.alpha:g}, is shared by {tests}; interval: "
            f"the ratio's, at {_percent(1 - self.judged.alpha)}"
        )

    def _exceptions(self) -> Iterator[str]:
        """Yield notes about cases (timed work) that were disturbed or that a version cannot run."""
        if any(self.judged.called("disturbed", old) for old in OLDS):
            yield "disturbed: other programs used the cores, which may have hidden a slow-down"
        for which, letter in LETTERS.items():
            reasons = {}
            for case, samples in self.judged.samples.items():
                if which in samples.unable:
                    reasons[case] = samples.unable[which]
            for reason, cases in by_value(reasons).items():
                yield f"not in {which} ({letter}): {cases}: {reason}"

    def _numbers(self) -> Iterator[Number]:
        """Yield entries (dictionaries of fields) for the formats CSV and JSON.

        There is an entry for each gate (a check without times), for each case (timed work) on each
        side, and for each mean over cases. A side is a version: A is the old version, B the new
        version, and C a second old version. Entries of side B have the ratio B/A. Entries of side C
        have the ratio B/C.
        """
        about: Number = {"experiment": "regression"}
        sides = {letter: tree.name for letter, tree in self._sides()}
        for gate in self.judged.gates:
            said = "; ".join(gate.lines)
            own: Number = {"row": gate.name, "metric": gate.name, "side": "B", "name": sides["B"]}
            yield {**about, **own, "verdict": gate.verdict, "reason": said}
        about["metric"] = METRIC
        of_side: dict[str, Old] = {"B": "base", "C": "also"}
        for case, samples in self.judged.samples.items():
            for which, letter in LETTERS.items():
                if letter not in sides:
                    continue
                milliseconds = _milliseconds(getattr(samples, which))
                reading = Reading(milliseconds, "ms") if milliseconds else None
                own = {"row": case, "side": letter, "name": sides[letter]}
                if letter in of_side:
                    own |= _decided(self.judged.decisions[of_side[letter]].get(case))
                reason = samples.unable.get(which)
                yield {**about, **own, **of_reading(reading, None), "reason": reason}
        for letter, old in of_side.items():
            for name, decision in self.judged.decisions[old].items():
                if name not in self.judged.samples:
                    own = {"row": name, "side": letter, "name": sides[letter]}
                    yield {**about, **own, **_decided(decision)}


def nearest(
    base: Sequence[Sequence[float]], head: Sequence[Sequence[float]], ratio: float
) -> tuple[float, float]:
    """Return the pair of samples whose ratio (head / base) is nearest to the given ratio.

    The table shows the times of this pair, so that they fit the ratio beside them. If several pairs
    are equally near, return the pair whose sample of base is nearest to the median of base.

    Args:
        base: The samples of the old version: a list for each restart of the timed processes.
        head: The samples of the new version. Each of them is paired with a sample in `base`.
        ratio: The given ratio.
    """
    old = list(chain.from_iterable(base))
    new = list(chain.from_iterable(head))
    usual = statistics.median(old)
    apart = []
    for x, y in zip(old, new, strict=True):
        from_ratio = round(abs(math.log(y / x / ratio)), 3)
        apart.append((from_ratio, abs(x - usual)))
    pair = apart.index(min(apart))
    return old[pair], new[pair]


def _ratio(decision: Decision | None) -> list[str]:
    """Return three cells: the ratio of two versions' times, its interval, and the verdict."""
    if decision is None:
        return ["", "", ""]
    interval = ""
    if decision.low is not None and decision.high is not None:
        interval = f"{decision.low:.2f}-{decision.high:.2f}"
    return [f"{decision.ratio:.2f}", interval, verdict(decision, METRIC)]


def _decided(decision: Decision | None) -> Number:
    if decision is None:
        return {}
    return {**asdict(decision), "verdict": verdict(decision, METRIC)}


def _milliseconds(restarts: Sequence[Sequence[float]]) -> list[float]:
    """Return one list of all samples in milliseconds, from a list of seconds for each restart."""
    return [1000 * seconds for seconds in chain.from_iterable(restarts)]


def _percent(share: float) -> str:
    return f"{100 * share:.4g} %"
