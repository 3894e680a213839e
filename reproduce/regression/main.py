"""Answer `python -m reproduce regression`: is the new code (head) slower than the old code (base)?

Each case (a training step) is timed with both versions, in processes that are restarted many times:

1. Each restart gives one number for a case: the median of head / base over its pairs of samples.
   The samples themselves are not independent: a process can be faster for its whole life.
2. A rank test decides whether these numbers show that head is slower or faster.
3. The geometric mean of these numbers over all cases is tested in the same way. The mean is less
   noisy than a single case, and shows a change that slows all cases down.

Cases are in two groups, called families: cases that are timed by CPU time, and cases that are timed
by wall clock, which show whether devices work at the same time. Each family has its own table and
its own mean. Alpha is the accepted risk of a false alarm in a family. Each test gets an equal part
of it: alpha divided by the number of tests in the larger family (Bonferroni correction).
"""

import contextlib
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace
from scipy import stats

from reproduce.error import Error, Worse
from reproduce.machine.devices import Devices
from reproduce.machine.git import Git
from reproduce.numbers.compare import ComparedRow, Comparison, verdict
from reproduce.numbers.match import Line
from reproduce.numbers.metrics import Reading, median_ratio
from reproduce.numbers.significance import Decision, Rule, compare_samples, needed
from reproduce.numbers.sources import Side
from reproduce.records.record import Record
from reproduce.regression.job import Samples, Settings, interleaved
from reproduce.regression.timed import Clock, load
from reproduce.regression.trees import Project, Tree, trees
from reproduce.run.recorder import new_run, now
from reproduce.tables.comparison import write_comparisons
from reproduce.tables.layout import by_value, many

METRIC, TOGETHER, WALL_TOGETHER = "time", "all together", "all by wall clock"
Tell = Callable[[str], None]  # shows how far the job is
Answer = tuple[Callable[[str], str], Error | None]
"""A function that writes the table in a format such as 'text', and what to raise if head fails."""


@dataclass(frozen=True)
class Judgement:
    """The samples of every case, and what the statistical tests decide from them.

    Attributes:
        samples: The samples of each case, by the name of the case.
        decisions: The decision for each case that both versions ran, by the name of the case. If
            several cases are timed by CPU time, the key `TOGETHER` has the decision about their
            mean. If several are timed by wall clock, the key `WALL_TOGETHER` has the one about
            theirs.
        rule: When a single test calls a difference significant.
    """

    samples: Mapping[str, Samples]
    decisions: Mapping[str, Decision]
    rule: Rule

    @property
    def worse(self) -> list[str]:
        """Return the names of the cases and means for which the new code is called slower."""
        names = []
        for name, decision in self.decisions.items():
            found = verdict(decision, METRIC)
            if found == "worse":
                names.append(name)
        return names


def judge(found: Mapping[str, Samples], rule: Rule) -> Judgement:
    """Decide for each case whether the new code (head) is slower than the old code (base).

    The mean over all cases that use the same clock (a family) is decided in the same way.

    Args:
        found: The samples of each case, by the name of the case.
        rule: When a difference is significant. Its `alpha` is the risk of a false alarm in all
            tests of a family together.
    """
    ratios: dict[str, list[float]] = {}
    most = 0
    clocks = {case: samples.clock for case, samples in found.items()}
    for together, cases in families(clocks).items():
        of_family = {}
        for case in cases:
            if not found[case].unable:
                of_family[case] = _ratios(found[case])
        if len(of_family) > 1:
            means = stats.gmean(list(of_family.values()), axis=0)
            of_family[together] = means.tolist()
        ratios |= of_family
        most = max(most, len(of_family))
    rule = Rule(rule.alpha / max(1, most), rule.threshold)
    decisions = {}
    for case, own in ratios.items():
        ones = [1.0] * len(own)
        decisions[case] = compare_samples(ones, own, rule, paired=True)
    return Judgement(found, decisions, rule)


def _ratios(samples: Samples) -> list[float]:
    """Return a ratio for each restart: the median of head / base over its pairs of samples."""
    ratios = []
    for base, head in zip(samples.base, samples.head, strict=True):
        ratios.append(median_ratio(head, base))
    return ratios


def families(cases: Mapping[str, Clock]) -> dict[str, list[str]]:
    """Group cases by their clock: return the names of the cases of each group (family).

    The key `TOGETHER` has the cases that are timed by CPU time, and `WALL_TOGETHER` has the others.
    `cases` contains the clock of each case.
    """
    found: dict[str, list[str]] = {}
    for case, clock in cases.items():
        together = TOGETHER if clock == "cpu" else WALL_TOGETHER
        found.setdefault(together, []).append(case)
    return found


def answer(base: str, head: str | None, settings: Settings, rule: Rule, tell: Tell) -> Answer:
    """Time two versions of the code; return a function that writes the table, and an error.

    The returned error says, for example, that a case is slower in `head`. It is None if all is
    well.

    Args:
        base: The git revision of the old version.
        head: The git revision of the new version, or None for the working tree.
        settings: What is measured, and for how long.
        rule: When a difference is significant.
        tell: A function that is called with a text about the progress.

    Raises:
        Error: There is no such revision, the measuring job ended before it was finished, or there
            are so few restarts that no difference could be significant.
    """
    check_restarts(settings, rule)
    run = new_run(Devices("cpu", 2, 1), settings.seed, ["python", "-m", "reproduce", *sys.argv[1:]])
    with trees(base, head, settings.project) as both:
        judged = measure(*both, settings, rule, tell)
    run = replace(run, state="finished", ended=now())
    sides = []
    for letter, tree in zip("AB", both, strict=True):
        git = None if tree.commit is None else Git(tree.commit, tree.dirty)
        of_tree = replace(run, git=git)
        record = Record(tree.name, tree.name, "measured", {}, [], run=of_tree)
        # A `Side` says where the results of one version come from. Its own list of results is
        # empty, because `comparisons` contains the times.
        sides.append(Side(letter, tree.name, [], [record]))
    parts = families(settings.cases).items()
    comparisons = [
        _comparison(judged, together, cases, settings, rule.alpha) for together, cases in parts
    ]
    complaint = _complaint(judged, both[0].name, both[1].name)
    return lambda style: write_comparisons(comparisons, sides, judged.rule, [], style), complaint


def check_restarts(settings: Settings, rule: Rule) -> None:
    """Raise `Error` if there are so few restarts that no result could be significant."""
    most = max(map(len, families(settings.cases).values()), default=0)
    least = least_restarts(rule, most)
    if settings.restarts < least:
        cases = many(most, "case")
        raise Error(
            f"--restarts {settings.restarts}: with {cases} and --alpha {rule.alpha:g}, nothing "
            f"could be called significant; give at least {least} restarts"
        )


def least_restarts(rule: Rule, cases: int) -> int:
    """Return the smallest number of restarts with which a result can be significant."""
    return needed(rule.alpha / max(1, cases + (cases > 1)), paired=True)


def measure(base: Tree, head: Tree, settings: Settings, rule: Rule, tell: Tell) -> Judgement:
    """Time all cases with two source trees, and decide which cases are slower.

    `tell` is called with a text that says how many restarts are finished.
    """
    found = {case: Samples(clock=clock) for case, clock in settings.cases.items()}
    with contextlib.closing(interleaved(base, head, settings)) as lines:
        for line in lines:
            samples = found[line["case"]]
            if "unable" in line:
                samples.unable = line["unable"]
                continue
            samples.base.append(line["samples"]["base"])
            samples.head.append(line["samples"]["head"])
            tell(f"restart {line['restart'] + 1} of {settings.restarts} done")
    return judge(found, rule)


def choose_cases(project: Project, wanted: Sequence[str]) -> dict[str, Clock]:
    """Return the cases whose names contain one of the texts `wanted`, in any letter case.

    If `wanted` is empty, return all cases. The result is a dictionary from the name of a case to
    the clock that times it.

    Raises:
        Error: One of the texts is not in the name of any case.
    """
    cases = load(project.cases)
    names: set[str] = set() if wanted else set(cases)
    for text in wanted:
        containing = [name for name in cases if text.lower() in name.lower()]
        if not containing:
            known = ", ".join(cases)
            raise Error(f"--case {text}: no case has this text in its name; the cases are {known}")
        names.update(containing)
    return {name: case.clock for name, case in cases.items() if name in names}


def _complaint(judged: Judgement, base: str, head: str) -> Error | None:
    """Return an error if head is slower or cannot run a case, or if nothing was compared."""
    if judged.worse:
        return Worse(f"slower than {base}: {', '.join(judged.worse)}")
    broken = {}
    for case, samples in judged.samples.items():
        if "head" in samples.unable:
            broken[case] = samples.unable["head"]
    if broken:
        cases = f"{many(len(broken), 'case')} cannot run in {head}: {', '.join(broken)}"
        reason = next(iter(broken.values()))
        return Error(f"{cases}: {reason}")
    if not judged.decisions:
        return Error(f"no case runs in {base}, so nothing shows that there is no regression")
    return None


def _comparison(
    judged: Judgement, together: str, cases: Sequence[str], settings: Settings, alpha: float
) -> Comparison:
    """Return the table of the cases that use one clock (a family), with notes on how to read it."""
    waits = together == WALL_TOGETHER
    family = "regression by wall clock" if waits else "regression"
    if settings.slow_down:
        family += f" WITH A PLANTED DELAY of {settings.slow_down:.0%} in each step of B"
    wall = waits if settings.clock is None else settings.clock == "wall"
    times = "CPU time on one core, which sees no waiting"
    if wall:
        times = "wall-clock times on two cores"
    restarts = many(settings.restarts, "restart")
    pairs = many(settings.rounds, "pair")
    tests = round(alpha / judged.rule.alpha)  # of the larger family
    of_family = {case: judged.samples[case] for case in cases}
    rows = []
    for case, samples in of_family.items():
        decision = judged.decisions.get(case)
        rows.append(_row(case, samples, decision))
    notes = [
        f"times are {times}",
        f"{restarts} of both sides; in each, {pairs} of samples of every case, in turn; a restart "
        "counts as one number, the median ratio of its pairs; A and B: the pair that is nearest to "
        "the ratio",
        f"the risk of calling noise significant, {alpha:g}, is shared by {many(tests, 'test')}",
        *_unable(of_family),
    ]
    mean = judged.decisions.get(together)
    return Comparison(family, METRIC, "ms", False, rows, notes, mean)


def _row(case: str, samples: Samples, decision: Decision | None) -> ComparedRow:
    """Return the table row of a case: a pair of samples, and the decision about head / base.

    The row shows the pair whose ratio is nearest to the decision's ratio. If several pairs are
    equally near, it shows the one whose time in base is nearest to the median time in base.
    """
    line = Line("regression", label=case)
    if decision is None:
        return ComparedRow(line, [None, None], [None, None])
    base = _milliseconds(samples.base)
    head = _milliseconds(samples.head)
    usual = statistics.median(base)
    apart = []
    for x, y in zip(base, head, strict=True):
        from_ratio = round(abs(math.log(y / x / decision.ratio)), 3)
        apart.append((from_ratio, abs(x - usual)))
    pair = apart.index(min(apart))
    readings: list[Reading | None] = [
        Reading(base, "ms", typical=base[pair]),
        Reading(head, "ms", typical=head[pair]),
    ]
    return ComparedRow(line, readings, [None, decision])


def _milliseconds(restarts: Sequence[Sequence[float]]) -> list[float]:
    """Return the samples of all restarts, converted from seconds to milliseconds."""
    found = []
    for samples in restarts:
        found += [1000 * seconds for seconds in samples]
    return found


def _unable(found: Mapping[str, Samples]) -> Iterator[str]:
    """Yield notes that say which cases cannot run in base or in head, and why."""
    for which, letter in (("base", "A"), ("head", "B")):
        reasons = {}
        for case, samples in found.items():
            if which in samples.unable:
                reasons[case] = samples.unable[which]
        for reason, cases in by_value(reasons).items():
            yield f"not in {which} ({letter}): {cases}: {reason}"
