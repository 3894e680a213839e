"""Find the commit that slowed training down, by a search like that of `git bisect`.

Unlike `git bisect`, this program does not check commits out: it copies every commit that it times
into a temporary folder. So the user's working tree does not change.
"""

import bisect
from collections.abc import Callable
from dataclasses import replace

from reproduce.error import Error
from reproduce.machine.git import commit_of, git
from reproduce.regression.job import Settings
from reproduce.regression.judge import Judgement, Limits, judge
from reproduce.regression.main import Tell, check_restarts, measure
from reproduce.regression.trees import Project, trees


def bisected(
    ends: tuple[str, str],
    settings: Settings,
    limits: Limits,
    tell: Tell,
    say: Callable[[str], None],
) -> str:
    """Find the first commit that is slower than the commit `good`; return its hash and subject.

    1. Time all cases (pieces of work, such as a training step) with the commits `good` and `bad`.
    2. Bisect the commits after `good`, up to `bad`. Time only the cases in which `bad` is slower.
       Follow only first parents, so that a merge counts as one commit.

    Args:
        ends: The commits `good` and `bad`.
        settings: The cases, and how they are timed.
        limits: How much slower a commit must be to count as slower.
        tell: A function that is called with a text about the progress, while a commit is timed.
        say: A function that is called with a line of text that has the result of a timed commit.

    Raises:
        Error: `bad` is not slower than `good`, a commit cannot run a case, other programs disturbed
            the cases of a commit, the timed processes are restarted too few times, or `between`,
            `trees` or `measure` raises an error.
    """
    good, bad = ends
    check_restarts(settings, limits)
    commits = between(settings.project, good, bad)

    worse: list[str] = []

    def slower(commit: str, settings: Settings) -> list[str]:
        with trees(good, commit, settings.project) as versions:
            judged = judge(measure(versions, settings, tell), limits)
        name = commit if commit == bad else commit[:9]
        _check_cases(judged, name, good, None if worse else say)
        # After the first comparison, only those cases matter in which `bad` is slower.
        disturbed = judged.called("disturbed", "base")
        if worse:
            disturbed = [case for case in disturbed if case in worse]
        if disturbed and not judged.worse:
            raise Error(
                f"cannot tell whether {name} is slower: other programs used the cores while "
                f"{', '.join(disturbed)} ran; run it again on a quiet machine"
            )
        found = "not slower"
        if judged.worse:
            found = f"slower: {', '.join(judged.worse)}"
        say(f"{name} is {found}")
        return judged.worse

    worse = slower(bad, settings)
    if not worse:
        raise Error(f"{bad} is not slower than {good}: there is no slower commit to search for")
    cases = {case: clock for case, clock in settings.cases.items() if case in worse}
    narrowed = replace(settings, cases=cases or settings.cases)

    def is_slower(commit: str) -> bool:
        return bool(slower(commit, narrowed))

    # `bad` itself is known to be slower.
    first = commits[bisect.bisect_left(commits[:-1], True, key=is_slower)]
    shown = git(settings.project.root, "show", "--no-patch", "--format=%h %s", first)
    return shown.decode()


def _check_cases(
    judged: Judgement, name: str, good: str, say: Callable[[str], None] | None
) -> None:
    """Raise `Error` if a case cannot run in a commit, or no case can run in the commit `good`.

    Args:
        judged: The times of the commit and of `good`.
        name: The name of the commit.
        good: The commit with which it is compared.
        say: A function that is called with a line for each case that cannot run in `good`; or None.
    """
    lacking = {}
    for case, samples in judged.samples.items():
        if "head" in samples.unable:
            raise Error(f"{case} cannot run in {name}: {samples.unable['head']}")
        if "base" in samples.unable:
            lacking[case] = samples.unable["base"]
    if len(lacking) == len(judged.samples):
        raise Error(f"no case can run in {good}: {'; '.join(lacking.values())}")
    if say is not None:
        for case, why in lacking.items():
            say(f"{case} is left out, because it cannot run in {good}: {why}")


def between(project: Project, good: str, bad: str) -> list[str]:
    """List the commits after `good`, up to `bad`, that change the package. The oldest comes first.

    Raises:
        Error: None of these commits changes the package, or `good` or `bad` does not exist.
    """
    start = commit_of(project.root, good)
    end = commit_of(project.root, bad)
    options = ("--first-parent", "--reverse")
    listed = git(project.root, "rev-list", *options, f"{start}..{end}", "--", *project.paths)
    found = listed.decode().split()
    if not found:
        raise Error(f"no commit after {good}, up to {bad}, changes {project.package}")
    return found
