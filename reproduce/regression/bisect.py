"""Find the commit that slowed training down.

Every revision is copied into a temporary folder. Nothing is checked out: the user's working tree stays as it is.
"""

import bisect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from reproduce.error import USAGE, Error
from reproduce.machine.description import ROOT
from reproduce.machine.git import commit_of, git
from reproduce.numbers.significance import Rule
from reproduce.regression.job import Settings
from reproduce.regression.main import Progress, check_restarts, measure
from reproduce.regression.trees import PACKAGE, trees


def bisected(
    good: str,
    bad: str,
    settings: Settings,
    rule: Rule,
    progress: Progress,
    say: Callable[[str], None],
    root: Path = ROOT,
) -> str:
    """Return the first commit after `good`, up to `bad`, that is slower than `good`: its hash and its subject.

    Only first parents are followed: a merge counts as one commit. First `bad` is measured; then only the cases that are
    slower in it. `say` is called with a line about each commit.

    Raises:
        Error: `bad` is not slower, no commit from `good` to `bad` changes torchgpipe, a commit cannot run a case; or
            as `answer`.
    """
    check_restarts(settings, rule)
    commits = between(root, good, bad)

    def slower(commit: str, settings: Settings) -> list[str]:
        with trees(good, commit, root) as both:
            judged = measure(*both, settings, rule, progress)
        for case, samples in judged.samples.items():
            if "head" in samples.unable:
                raise Error(f"{case} cannot run in {commit[:9]}: {samples.unable['head']}")
        say(f"{commit[:9]} is {'slower: ' + ', '.join(judged.worse) if judged.worse else 'not slower'}")
        return judged.worse

    worse = slower(bad, settings)
    if not worse:
        raise Error(f"{bad} is not slower than {good}: there is no commit to search for")
    settings = replace(settings, cases=[case for case in settings.cases if case in worse] or settings.cases)
    # `bad` itself is known to be slower.
    first = bisect.bisect_left(commits[:-1], True, key=lambda commit: bool(slower(commit, settings)))
    return git(root, "show", "--no-patch", "--format=%h %s", commits[first]).decode()


def between(root: Path, good: str, bad: str) -> list[str]:
    """List the commits after `good`, up to `bad`, that change torchgpipe, the oldest first.

    Raises:
        Error: a revision is not found, or there is no such commit.
    """
    old, new = commit_of(root, good), commit_of(root, bad)
    found = git(root, "rev-list", "--first-parent", "--reverse", f"{old}..{new}", "--", PACKAGE).decode().split()
    if not found:
        raise Error(f"no commit after {good}, up to {bad}, changes {PACKAGE}", USAGE)
    return found
