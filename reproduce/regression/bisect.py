"""Find the commit that slowed training down.

Every revision is copied into a temporary folder. Nothing is checked out: the user's working tree stays as it is.
"""

import bisect
from collections.abc import Callable
from dataclasses import replace

from reproduce.error import Error
from reproduce.machine.git import commit_of, git
from reproduce.numbers.significance import Rule
from reproduce.regression.job import Settings
from reproduce.regression.main import Tell, check_restarts, measure
from reproduce.regression.trees import Project, trees


def bisected(
    good: str, bad: str, settings: Settings, rule: Rule, tell: Tell, say: Callable[[str], None]
) -> str:
    """Return the first commit after `good`, up to `bad`, that is slower than `good`: its hash and its subject.

    Only first parents are followed: a merge counts as one commit. First `bad` is measured; then only the cases that are
    slower in it. `say` is called with a line about each commit.
    It raises `Error` if `bad` is not slower, or a commit cannot run a case; or as `between` and `answer`.
    """
    check_restarts(settings, rule)
    commits = between(settings.project, good, bad)

    def slower(commit: str, settings: Settings) -> list[str]:
        with trees(good, commit, settings.project) as both:
            judged = measure(*both, settings, rule, tell)
        for case, samples in judged.samples.items():
            if "head" in samples.unable:
                raise Error(f"{case} cannot run in {commit[:9]}: {samples.unable['head']}")
        say(
            f"{commit[:9]} is {'slower: ' + ', '.join(judged.worse) if judged.worse else 'not slower'}"
        )
        return judged.worse

    worse = slower(bad, settings)
    if not worse:
        raise Error(f"{bad} is not slower than {good}: there is no commit to search for")
    cases = {case: clock for case, clock in settings.cases.items() if case in worse}
    settings = replace(settings, cases=cases or settings.cases)
    # `bad` itself is known to be slower.
    first = bisect.bisect_left(
        commits[:-1], True, key=lambda commit: bool(slower(commit, settings))
    )
    return git(
        settings.project.root, "show", "--no-patch", "--format=%h %s", commits[first]
    ).decode()


def between(project: Project, good: str, bad: str) -> list[str]:
    """List the commits after `good`, up to `bad`, that change the package, the oldest first, or raise `Error`."""
    range_ = f"{commit_of(project.root, good)}..{commit_of(project.root, bad)}"
    listed = git(
        project.root, "rev-list", "--first-parent", "--reverse", range_, "--", *project.paths
    )
    if not (found := listed.decode().split()):
        raise Error(f"no commit after {good}, up to {bad}, changes {project.package}")
    return found
