"""Answer what `python -m reproduce regression` was asked: check out, measure, judge, render."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from reproduce.error import USAGE, Error
from reproduce.machine.description import load_average, machine, versions
from reproduce.machine.git import Git
from reproduce.numbers.significance import Rule
from reproduce.records.record import Run
from reproduce.regression.cases import CASES
from reproduce.regression.job import Settings, collect, interleaved
from reproduce.regression.judge import Judgement, judge, least_restarts, shared
from reproduce.regression.show import comparison, sides
from reproduce.regression.trees import Tree, trees
from reproduce.run.recorder import now
from reproduce.tables.comparison import write_comparisons
from reproduce.tables.layout import many

__all__ = ["Answer", "Settings", "answer", "choose_cases", "measure"]

Told = Callable[[int], None]


@dataclass(frozen=True)
class Answer:
    """Hold what was found, rendered in any style, and why it does not pass, None where it does."""

    judged: Judgement
    base: tuple[str, Run]
    head: tuple[str, Run]
    settings: Settings
    rule: Rule

    @property
    def complaint(self) -> str | None:
        """Say what is slower or does not run any more, or that nothing was compared."""
        slower = self.judged.worse
        broken = [each.case for each in self.judged.cases if "head" in each.samples.unable]
        if slower:
            return f"slower than {self.base[0]}: {', '.join(slower)}"
        if broken:
            why = next(each.samples.unable["head"] for each in self.judged.cases if each.case == broken[0])
            return f"{many(len(broken), 'case')} cannot run in {self.head[0]}: {', '.join(broken)}: {why}"
        if not self.judged.able:
            return f"no case runs in {self.base[0]}, so nothing shows that there is no regression"
        return None

    def text(self, style: str) -> str:
        """Return the table as 'text', 'markdown', 'csv' or 'json'."""
        both = sides(self.judged, self.base, self.head)
        content = comparison(self.judged, both, self.settings, self.rule)
        each = shared(self.rule, self.judged.able)
        return write_comparisons([content], both, each, [], style)


def answer(base: str, head: str | None, settings: Settings, rule: Rule, told: Told = lambda restart: None) -> Answer:
    """Compare `head`, a revision or None for the working tree as it is, with the revision `base`.

    Raises:
        Error: with so few restarts nothing could ever be significant, a revision cannot be had, or the measuring job
            ended before it was done.
    """
    least = least_restarts(rule, len(settings.cases))
    if settings.restarts < least:
        raise Error(
            f"--restarts {settings.restarts}: of {many(len(settings.cases), 'case')} at --alpha {rule.alpha:g}, "
            f"nothing could be called significant; give at least {least}",
            USAGE,
        )
    with trees(base, head) as (old, new):
        under = Run(
            state="finished",  # it is shown only if it was
            command=["python", "-m", "reproduce", *sys.argv[1:]],
            seed=settings.seed,
            started=now(),
            ended=None,
            device="cpu",
            devices=2,
            threads_per_device=1,
            machine=machine(),
            versions=versions(),
            git=None,
            load=load_average(),
        )
        judged = measure(old, new, settings, rule, told)
    both = [
        (tree.name, replace(under, ended=now(), git=None if tree.commit is None else Git(tree.commit, tree.dirty)))
        for tree in (old, new)
    ]
    return Answer(judged, both[0], both[1], settings, rule)


def measure(base: Tree, head: Tree, settings: Settings, rule: Rule, told: Told = lambda restart: None) -> Judgement:
    """Run the job on two trees and judge every case."""
    with contextlib.closing(interleaved(base, head, settings)) as lines:
        return judge(collect(lines, settings.cases, told), rule)


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
