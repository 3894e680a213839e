"""Answer what `python -m reproduce regression` was asked: was a case, or all together, slowed down for real?

Samples of one process are no independent evidence: whatever makes this process quicker than that one is in all of
them, and more of them only make it more certain. So a restart gives one number, the median over its pairs of head
by base, and the rank test is over the restarts. Their geometric mean over the cases is judged likewise: it is less
noisy than any of them, and shows what slows all down. The risk of a false alarm is one for all of these tests: each has
an equal share of alpha (Bonferroni).
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
"""What writes the table as 'text', 'markdown', 'csv' or 'json', and why it does not pass, or None."""


@dataclass(frozen=True)
class Judgement:
    """Hold the samples of every case, and how the head compares under the rule for each test.

    `decisions` has the cases that both sides ran, and, where these are several, all of them `TOGETHER`.
    """

    samples: Mapping[str, Samples]
    decisions: Mapping[str, Decision]
    rule: Rule

    @property
    def worse(self) -> list[str]:
        """Name what the head made slower for real."""
        return [name for name, decision in self.decisions.items() if verdict(decision, METRIC) == "worse"]


def judge(found: Mapping[str, Samples], rule: Rule) -> Judgement:
    """Return how the head compares in every case, and in all of them; `rule.alpha` is the risk of all tests."""
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
        # As `compare` has it; its times are in the comparison.
        sides.append(Side(letter, tree.name, [], [Record(tree.name, tree.name, "measured", {}, [], run=of_tree)]))
    comparison = _comparison(judged, settings, rule.alpha)
    complaint = _complaint(judged, both[0].name, both[1].name)
    return lambda style: write_comparisons([comparison], sides, judged.rule, [], style), complaint


def check_restarts(settings: Settings, rule: Rule) -> None:
    """Raise `Error` where with so few restarts nothing could ever be significant."""
    least = least_restarts(rule, len(settings.cases))
    if settings.restarts < least:
        raise Error(
            f"--restarts {settings.restarts}: with {many(len(settings.cases), 'case')} and --alpha {rule.alpha:g}, "
            f"nothing could be called significant; give at least {least}",
            USAGE,
        )


def least_restarts(rule: Rule, cases: int) -> int:
    """Return with how many restarts anything can be significant at all."""
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
    """Return the cases whose names contain one of the texts, or all.

    Raises:
        Error: a text is in none.
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
    """Return the table's content, with what its reader has to know."""
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
