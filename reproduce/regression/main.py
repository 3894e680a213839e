"""Answer `python -m reproduce regression`: is a case, or are all cases together, really slower?

Samples of one process are not independent: if one process happens to be faster than another, all of its samples are.
So each restart gives one number, the median of head / base over its pairs of samples, and the rank test compares these
numbers. Their geometric mean over all cases is tested in the same way: it is less noisy than a single case, and shows
a change that slows all of them. Alpha is the risk of a false alarm in all tests together: each gets an equal share
(Bonferroni).
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace
from scipy import stats

from reproduce.error import USAGE, Error
from reproduce.machine.devices import Devices
from reproduce.machine.git import Git
from reproduce.numbers.compare import ComparedRow, Comparison, verdict
from reproduce.numbers.match import Line
from reproduce.numbers.metrics import Reading, median_ratio
from reproduce.numbers.significance import Decision, Rule, compare_samples, needed
from reproduce.numbers.sources import Side
from reproduce.records.record import Record
from reproduce.regression.cases import CASES
from reproduce.regression.job import Samples, Settings, interleaved
from reproduce.regression.trees import Tree, trees
from reproduce.run.recorder import new_run, now
from reproduce.tables.comparison import write_comparisons
from reproduce.tables.layout import many

METRIC, TOGETHER = "time", "all together"
Progress = Callable[[int], None]
Answer = tuple[Callable[[str], str], str | None]
"""A function that writes the table in a format ('text', 'markdown', ...), and why head fails, or None."""


@dataclass(frozen=True)
class Judgement:
    """Hold the samples of every case, and the tests' decisions. `rule` is that of a single test.

    `decisions` has the cases that both sides ran and, if there are several, `TOGETHER` for all of them.
    """

    samples: Mapping[str, Samples]
    decisions: Mapping[str, Decision]
    rule: Rule

    @property
    def worse(self) -> list[str]:
        """Name what is really slower in head."""
        return [name for name, decision in self.decisions.items() if verdict(decision, METRIC) == "worse"]


def judge(found: Mapping[str, Samples], rule: Rule) -> Judgement:
    """Compare head with base in every case and in all together. `rule.alpha` is the risk over all tests."""
    of_cases = {
        case: [median_ratio(head, base) for base, head in zip(samples.base, samples.head, strict=True)]
        for case, samples in found.items()
        if not samples.unable
    }
    if len(of_cases) > 1:
        of_cases[TOGETHER] = stats.gmean(list(of_cases.values()), axis=0).tolist()
    rule = _share(rule, len(of_cases))
    decisions = {case: compare_samples([1.0] * len(own), own, rule, paired=True) for case, own in of_cases.items()}
    return Judgement(found, decisions, rule)


def answer(base: str, head: str | None, settings: Settings, rule: Rule, progress: Progress) -> Answer:
    """Compare `head`, a revision or None for the working tree as it is, with the revision `base`.

    Raises:
        Error: with so few restarts nothing could ever be significant, a revision cannot be had, or the measuring job
            ended before it was done.
    """
    check_restarts(settings, rule)
    run = new_run(Devices("cpu", 2, 1), settings.seed, ["python", "-m", "reproduce", *sys.argv[1:]])
    with trees(base, head) as both:
        judged = measure(*both, settings, rule, progress)
    run = replace(run, state="finished", ended=now())
    sides = []
    for letter, tree in zip("AB", both, strict=True):
        of_tree = replace(run, git=None if tree.commit is None else Git(tree.commit, tree.dirty))
        # A side as `compare` loads it, but without rows: the comparison holds the times.
        sides.append(Side(letter, tree.name, [], [Record(tree.name, tree.name, "measured", {}, [], run=of_tree)]))
    comparison = _comparison(judged, settings, rule.alpha)
    complaint = _complaint(judged, both[0].name, both[1].name)
    return lambda style: write_comparisons([comparison], sides, judged.rule, [], style), complaint


def check_restarts(settings: Settings, rule: Rule) -> None:
    """Raise `Error` if there are too few restarts for anything to be significant."""
    least = least_restarts(rule, len(settings.cases))
    if settings.restarts < least:
        raise Error(
            f"--restarts {settings.restarts}: with {many(len(settings.cases), 'case')} and --alpha {rule.alpha:g}, "
            f"nothing could be called significant; give at least {least}",
            USAGE,
        )


def least_restarts(rule: Rule, cases: int) -> int:
    """Return the smallest number of restarts with which anything can be significant."""
    return needed(_share(rule, cases + (cases > 1)).alpha, paired=True)


def _share(rule: Rule, tests: int) -> Rule:
    return Rule(rule.alpha / max(1, tests), rule.threshold)


def measure(base: Tree, head: Tree, settings: Settings, rule: Rule, progress: Progress) -> Judgement:
    """Run the job on two trees and judge every case; `progress` is told how many restarts are done."""
    found = {case: Samples() for case in settings.cases}
    with contextlib.closing(interleaved(base, head, settings)) as lines:
        for line in lines:
            samples = found[line["case"]]
            if "unable" in line:
                samples.unable = line["unable"]
                continue
            samples.base.append(line["samples"]["base"])
            samples.head.append(line["samples"]["head"])
            progress(line["restart"] + 1)
    return judge(found, rule)


def choose_cases(wanted: Sequence[str]) -> list[str]:
    """Return the cases whose names contain one of the texts; without texts, all.

    Raises:
        Error: no case's name contains a text.
    """
    names = [case.name for case in CASES]
    for text in wanted:
        if not any(text.lower() in name.lower() for name in names):
            raise Error(f"--case {text}: no case's name contains it; there are {', '.join(names)}", USAGE)
    return [name for name in names if not wanted or any(text.lower() in name.lower() for text in wanted)]


def _complaint(judged: Judgement, base: str, head: str) -> str | None:
    """Say what is slower or does not run any more, or that nothing was compared."""
    broken = {case: samples.unable["head"] for case, samples in judged.samples.items() if "head" in samples.unable}
    if judged.worse:
        return f"slower than {base}: {', '.join(judged.worse)}"
    if broken:
        return f"{many(len(broken), 'case')} cannot run in {head}: {', '.join(broken)}: {next(iter(broken.values()))}"
    if not judged.decisions:
        return f"no case runs in {base}, so nothing shows that there is no regression"
    return None


def _comparison(judged: Judgement, settings: Settings, alpha: float) -> Comparison:
    """Return the content of the table, and notes on how to read it."""
    seen = {
        "cpu": "times are CPU time on one core; waiting and overlap are seen only with --clock wall",
        "wall": "times are wall-clock times on all cores",
    }
    planted = f" WITH A PLANTED DELAY of {settings.slow_down:.0%} in each step of B" if settings.slow_down else ""
    rows = [_row(case, samples, judged.decisions.get(case)) for case, samples in judged.samples.items()]
    notes = [
        seen[settings.clock],
        f"{many(settings.restarts, 'restart')} of both sides; in each, {many(settings.rounds, 'pair')} of samples of "
        "every case, in turn; a restart counts as one number, the median ratio of its pairs",
        f"the risk of calling noise significant, {alpha:g}, is shared by {many(len(judged.decisions), 'test')}",
        *_unable(judged.samples),
    ]
    return Comparison(f"regression{planted}", METRIC, "ms", False, rows, notes, judged.decisions.get(TOGETHER))


def _row(case: str, samples: Samples, decision: Decision | None) -> ComparedRow:
    readings = [
        None if decision is None else Reading([1000 * seconds for restart in restarts for seconds in restart], "ms")
        for restarts in (samples.base, samples.head)
    ]
    return ComparedRow(Line("regression", label=case), readings, [None, decision])


def _unable(found: Mapping[str, Samples]) -> Iterator[str]:
    """Say which cases a side cannot run, and why."""
    for which, letter in (("base", "A"), ("head", "B")):
        reasons = {case: samples.unable[which] for case, samples in found.items() if which in samples.unable}
        for reason in dict.fromkeys(reasons.values()):
            cases = ", ".join(case for case, why in reasons.items() if why == reason)
            yield f"not in {which} ({letter}): {cases}: {reason}"
