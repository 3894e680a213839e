"""Compare the new code (head) with the old code (base), for `python -m reproduce regression`.

First run the gates, which are checks that measure no time. Then time the cases, which are pieces of
work such as a training step (`reproduce.regression.job`), and decide whether the new code is slower
(`reproduce.regression.judge`).
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from reproduce.error import Error
from reproduce.machine.description import machine
from reproduce.regression.gates import judged_by
from reproduce.regression.job import Samples, Settings, interleaved
from reproduce.regression.judge import Limits, complaint, judge, least_restarts
from reproduce.regression.table import Report
from reproduce.regression.timed import Clock, load
from reproduce.regression.trees import Project, Trees, trees
from reproduce.tables.layout import many

Tell = Callable[[str], None]  # shows how far the job is
TIMES = "times"


class Asked(NamedTuple):
    """The versions of a package to compare.

    Attributes:
        base: The git revision of the old version.
        head: The git revision of the new version, or None for the working tree.
        also: The git revision of a second old version, from before `base`, to compare the new
            version with. None to compare only with `base`.
    """

    base: str
    head: str | None = None
    also: str | None = None


def answer(
    asked: Asked, settings: Settings, limits: Limits, tell: Tell, gates: Sequence[str] = ()
) -> tuple[Report, Error | None]:
    """Judge the new version of the code; return a report, and an error.

    The returned error says, for example, that a case is slower in the new version. It is None if
    the new version is not worse.

    Args:
        asked: The new version, and one or two old versions.
        settings: What is measured, and for how long. If it has no cases, no time is measured.
        limits: What counts as slower.
        tell: A function that is called with a text about the progress.
        gates: The names of the modules of the gates, which are checks that measure no time.

    Raises:
        Error: A revision does not exist, a gate says that the package does not run, the process
            that measures has died, or the settings have too few restarts of the timed processes
            for a significant difference.
    """
    check_restarts(settings, limits, 1 if asked.also is None else 2)
    with trees(asked.base, asked.head, settings.project, asked.also) as versions:
        found = []
        for module in gates:
            tell(f"the gate {module.rpartition('.')[2]} runs")
            found.append(judged_by(module, versions.base, versions.head))
        judged = judge(measure(versions, settings, tell), limits, found)
    wrong = complaint(judged, asked.base, versions.head.name, asked.also)
    conclusion = f"not worse than {asked.base}"
    if asked.also is not None:
        conclusion += f", nor than {asked.also}"
    if wrong is not None:
        conclusion = str(wrong)
    return Report(judged, versions, settings, limits, machine().cpu, conclusion), wrong


def check_restarts(settings: Settings, limits: Limits, olds: int = 1) -> None:
    """Raise `Error` if the settings ask for too few restarts of the timed processes.

    With too few restarts, no difference between versions could be significant.

    Args:
        settings: The settings of the measurement, which include the number of restarts.
        limits: What counts as slower.
        olds: The number of old versions with which the new version is compared.
    """
    clocks = {case: settings.clock or clock for case, clock in settings.cases.items()}
    least = least_restarts(limits, clocks, olds)
    if settings.cases and settings.restarts < least:
        cases = many(len(settings.cases), "case")
        raise Error(
            f"--restarts {settings.restarts}: with {cases} and --alpha {limits.alpha:g}, no "
            "difference could be significant after so few restarts of the timed processes; give at "
            f"least {least}"
        )


def measure(versions: Trees, settings: Settings, tell: Tell) -> dict[str, Samples]:
    """Time all cases with all versions; return a dictionary from a case's name to its samples.

    The function `tell` is called with a text that says how many restarts are finished.
    """
    found = {case: Samples(clock=settings.clock or clock) for case, clock in settings.cases.items()}
    with contextlib.closing(interleaved(versions, settings)) as lines:
        for line in lines:
            samples = found[line["case"]]
            if "unable" in line:
                samples.unable = line["unable"]
                continue
            for way, of_restart in line["samples"].items():
                getattr(samples, way).append(of_restart)
            samples.busy.append(line["busy"])
            tell(f"restart {line['restart'] + 1} of {settings.restarts} done")
    return found


def choose_cases(project: Project, wanted: Sequence[str]) -> dict[str, Clock]:
    """Return the cases (timed work) whose names contain one of the texts `wanted`.

    Upper and lower case make no difference. If `wanted` is empty, return all cases of the project.
    In the result, the keys are the names of the cases, and the values are the clocks that time
    them.

    Raises:
        Error: One of the texts is not in the name of any case.
    """
    cases = load(project.cases)
    names: set[str] = set() if wanted else set(cases)
    for text in wanted:
        containing = [name for name in cases if text.lower() in name.lower()]
        if not containing:
            known = ", ".join(cases)
            raise Error(
                f"--case {text}: no case (timed work) has this text in its name; the names of the "
                f"cases are {known}"
            )
        names.update(containing)
    return {name: case.clock for name, case in cases.items() if name in names}


def choose_gates(
    project: Project, gates: Sequence[str], cases: Sequence[str]
) -> tuple[list[str], bool]:
    """Return the modules of the gates to run, and whether to measure times.

    A gate is a check that measures no time. The user chooses gates by name. The name `times` in the
    same list is not a gate: it chooses the measurement of times.

    Args:
        project: The package.
        gates: The names that the user has chosen. If there are none, all gates and the times are
            chosen, or only the times if the user has chosen cases.
        cases: The texts by which the user has chosen cases (pieces of work to time).

    Raises:
        Error: The package has no gate of a chosen name, or cases are chosen without the times.
    """
    known = {module.rpartition(".")[2]: module for module in project.gates}
    names = gates or ([TIMES] if cases else [*known, TIMES])
    for name in names:
        if name != TIMES and name not in known:
            have = ", ".join([*known, TIMES])
            raise Error(f"--gate {name}: {project.package} has no such gate; it has {have}")
    if cases and TIMES not in names:
        raise Error(
            "--case chooses what is timed, but the gates that --gate chooses time nothing: add "
            "--gate times, or leave --case out"
        )
    return [module for name, module in known.items() if name in names], TIMES in names
