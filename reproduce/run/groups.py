"""Decide which rows of a speed experiment run, how, in which groups, and for how long.

A row is a configuration of the experiment. It is measured if this machine has enough devices. It is
emulated if it needs at most as many devices as the option `--emulate` says. A row can be both
measured and emulated.

Rows that are compared with each other form a group. Their steps run alternately.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from reproduce.experiments.row import Row
from reproduce.records.record import TORCH_ENGINES, Engine, Result
from reproduce.run.emulation import shortened
from reproduce.run.engines.engines import why_not
from reproduce.run.session import Session

# If measuring a row takes more than this share of its group's time limit, the row is only emulated.
LARGEST_SHARE = 0.4


@dataclass(frozen=True, eq=False)
class PlannedTask:
    """A row (configuration) to run, and how: measured with an engine, or emulated.

    Attributes:
        row: The row.
        emulated: Whether the row is emulated. Otherwise it is measured.
        engine: What runs the partitions of a measured row in parallel, such as threads.
        before: The samples that an interrupted run has measured, if this run continues it.
        left_out: How many rounds of that run were left out, because other programs disturbed them.
    """

    row: Row
    emulated: bool
    engine: Engine = "threads"
    before: Mapping[str, Sequence[float]] = field(default_factory=dict)
    left_out: int = 0

    def continued(self, found: Result) -> "PlannedTask":
        """Return a copy of this task that continues an interrupted run.

        `found` is the row's result in that run. The copy gets from it the samples, the number of
        rounds that were left out, and the balance (the number of layers of each partition).
        """
        balance = found.config.get("balance")
        row = replace(self.row, balance=balance and tuple(balance))
        left_out = found.values.get("disturbed_rounds", 0)
        return replace(self, row=row, before=found.samples, left_out=left_out)

    def __str__(self) -> str:
        if self.emulated:
            how = "emulated"
        elif self.engine == "threads":
            how = "measured"
        else:
            how = f"measured with {self.engine}"
        return f"{self.row.name}, {how}"

    @property
    def watching_steps(self) -> int:
        """Return how many steps run after the timed ones, to measure how busy the devices are."""
        return 0 if self.emulated else 1

    @property
    def title(self) -> str:
        """Return the title of the row's timeline."""
        if self.emulated:
            return f"{self.row.name} emulated"
        if self.engine == "threads":
            return self.row.name
        return f"{self.row.name} {self.engine}"

    @property
    def kind(self) -> dict[str, Any]:
        """Return how the row runs: a dictionary with the keyword arguments `emulated` and `engine`.

        Methods of `Session` take these arguments.
        """
        return {"emulated": self.emulated, "engine": self.engine}

    @property
    def work(self) -> float:
        """Return the estimated cost of one step, in the unit of `Row.work`."""
        if self.emulated:
            return shortened(self.row).work()
        return self.row.work() / self.row.devices


class Group(NamedTuple):
    """A group of rows that are compared with each other, and the group's time limit in seconds.

    Steps of the rows run alternately, so that slow phases of the machine affect all rows equally.
    The time limit ends the group, unless the user has chosen the number of steps with `--steps`.
    The time limit always decides which rows take too long to be measured.
    """

    name: str
    tasks: list[PlannedTask]
    limit: float


def groups_of(session: Session) -> list[Group]:
    """Return all groups of rows (configurations) of the experiment, with their time limits.

    If this machine can run no row of a group, the group has no tasks.
    """
    tasks_of: dict[str, list[PlannedTask]] = {}
    for row in session.scale.rows:
        tasks = tasks_of.setdefault(row.group, [])
        tasks.extend(_tasks_of(session, row))
    per_work = _seconds_per_work(session, tasks_of)

    groups = []
    for name, tasks in tasks_of.items():
        limit = per_work * _work(tasks) if tasks else math.inf
        groups.append(Group(name, tasks, limit))
    return groups


def _tasks_of(session: Session, row: Row) -> list[PlannedTask]:
    """Return the tasks of a row (configuration). Each is one way to run the row on this machine.

    There is a task for each engine that can run the row, and one more if the row can be emulated.
    """
    tasks = []
    if row.devices <= session.devices.count:
        for engine in session.engines:
            problem = why_not(engine, row, session.devices)
            if problem is None:
                tasks.append(PlannedTask(row, emulated=False, engine=engine))
    if row.devices <= session.emulate:
        tasks.append(PlannedTask(row, emulated=True))
    return tasks


def _seconds_per_work(session: Session, tasks_of: Mapping[str, list[PlannedTask]]) -> float:
    """Return the seconds that a group may run for each unit of its estimated cost.

    The scale of the run (a set of sizes, such as `small`) has a time limit. The groups without
    extra rows share this time in proportion to their costs. (An extra row runs only with the option
    --all or --row.) A group with extra rows gets additional time, at the same rate.

    Args:
        session: The running experiment.
        tasks_of: Maps the name of each group to its tasks.
    """
    if not session.scale.seconds:
        return math.inf
    usual = total = 0.0
    for tasks in tasks_of.values():
        work = _work(tasks)
        total += work
        if not any(task.row.extra for task in _counted(tasks)):
            usual += work
    return session.scale.seconds / (usual or total or 1)


def _work(tasks: list[PlannedTask]) -> float:
    """Return the sum of the estimated costs of one step of each task of a group.

    Only the tasks that determine the time limit of the group are included (`_counted`).
    """
    return sum(task.work for task in _counted(tasks))


def _counted(tasks: list[PlannedTask]) -> list[PlannedTask]:
    """Return the tasks of a group whose estimated cost determines the time limit of the group.

    If a row of the group is emulated, these are only the emulated tasks, because the run may leave
    out measured tasks that take too long. Otherwise, these are all tasks.
    """
    emulated = [task for task in tasks if task.emulated]
    return emulated or tasks


def plan_speed(session: Session) -> None:
    """Record which rows of a speed experiment will run, and why the remaining rows will not.

    Also tell the progress display how many steps will run. If an interrupted run is continued, its
    results are kept.
    """
    for row in session.scale.rows:
        for engine in session.engines:
            emulated_instead = engine == "threads" and row.devices <= session.emulate
            if not emulated_instead and session.found(row, engine=engine) is None:
                _plan_measured(session, row, engine)

    for group in groups_of(session):
        for task in group.tasks:
            if session.found(task.row, **task.kind) is None:
                session.plan(task.row, **task.kind)
        tasks = remaining(session, group)
        _plan_steps(session, group, [*tasks, *without_memory(session, group, tasks)])


def _plan_measured(session: Session, row: Row, engine: Engine) -> None:
    """Record that a row will be measured with an engine (such as `threads`), or why it is not."""
    reason = why_not(engine, row, session.devices)
    status = "not run"
    if row.devices > session.devices.count:
        reason = f"needs {row.devices} devices"
        status = "needs devices"
    if reason is None:
        session.plan(row, engine=engine)
    else:
        session.recorder.put(session.result(row, engine=engine, status=status, reason=reason))


def _plan_steps(session: Session, group: Group, tasks: Sequence[PlannedTask]) -> None:
    """Tell the progress display how many steps the tasks of a group will probably run.

    Building the model of a task counts as one step. If the row (configuration) is measured and not
    emulated, one more step measures how busy the devices are.
    """
    guesses: dict[PlannedTask, float | None] = {}
    skipped: set[PlannedTask] = set()
    emulated = {task.row.name for task in tasks if task.emulated}
    seconds: float | None = 0.0  # of a round
    for task in tasks:
        guess = session.guess(task.row, task.work, **task.kind)
        guesses[task] = guess
        is_judged = not task.emulated and task.row.name in emulated
        if is_judged and guess is not None and takes_too_long(session, group, task, guess):
            skipped.add(task)
        else:
            seconds = None if seconds is None or guess is None else seconds + guess
    before = min((len(task.before["step_time"]) for task in tasks if task.before), default=0)
    rounds = further_rounds(session, group, seconds, SoFar(before))
    for task, guess in guesses.items():
        steps = 1 + warmup_steps(session, task) + rounds + task.watching_steps
        if task in skipped:
            steps = 0
        session.progress.plan(session.job(task), steps, guess, session.job(group.name))


def takes_too_long(session: Session, group: Group, task: PlannedTask, seconds: float) -> bool:
    """Return whether measuring a row would take too much of its group's time limit.

    If so, the row is only emulated.

    Args:
        session: The running experiment.
        group: The group of rows, with its time limit.
        task: The row, and how it runs.
        seconds: The time of one step of the row.
    """
    return seconds * least_steps(session, task) > LARGEST_SHARE * group.limit


def least_steps(session: Session, task: PlannedTask) -> int:
    """Return how many steps a task needs at least, the warm-up included."""
    return session.scale.least_steps + warmup_steps(session, task)


def rounds_wanted(session: Session) -> int:
    """Return how many undisturbed rounds a group of rows runs if there is no time limit.

    In a round, each row of the group runs one step. A round is undisturbed if other programs used
    little of the machine.
    """
    return session.steps or session.scale.steps


def time_is_over(session: Session, group: Group, seconds: float) -> bool:
    """Return whether a group of rows that has run for `seconds` has used up its time limit."""
    return session.steps is None and seconds > group.limit


class SoFar(NamedTuple):
    """The rounds that a group of rows has run so far. In a round, each row runs one step.

    Attributes:
        rounds: The number of rounds.
        disturbed: The number of those rounds that other programs disturbed.
        seconds: The time that all rounds took together.
    """

    rounds: int = 0
    disturbed: int = 0
    seconds: float = 0.0


def further_rounds(session: Session, group: Group, seconds: float | None, so_far: SoFar) -> int:
    """Estimate how many more rounds a group of rows will run. In a round, each row runs one step.

    Rounds that other programs disturbed are run again.

    Args:
        session: The running experiment.
        group: The group of rows, with its time limit.
        seconds: The time of a round, or None if it is not known.
        so_far: The rounds that the group has run.
    """
    wanted = max(0, rounds_wanted(session) + so_far.disturbed - so_far.rounds)
    if session.steps is not None or math.isinf(group.limit) or not seconds:
        return wanted
    least = max(0, session.scale.least_steps - so_far.rounds)
    left = group.limit - so_far.seconds
    in_time = 0 if left < 0 else 1 + int(left / seconds)
    return min(wanted, max(least, in_time))


def remaining(session: Session, group: Group) -> list[PlannedTask]:
    """Return the tasks of a group that still have to run when an interrupted run is continued.

    The tasks of a group are compared with each other, so they are continued together:

    - If a task has no result, or if other programs disturbed its result, return all tasks. The
      group starts again.
    - If all tasks with timed steps are finished (`_is_done`), return no task.
    - Otherwise, return the tasks with timed steps, which then run more steps. Leave out the tasks
      without timed steps, because they have failed or were not measured.
    """
    timed: dict[PlannedTask, Result] = {}
    for task in group.tasks:
        found = session.found(task.row, **task.kind)
        if found is None or found.disturbed:
            return group.tasks
        if found.samples:
            timed[task] = found
    if all(_is_done(session, task, found) for task, found in timed.items()):
        return []
    return [task.continued(found) for task, found in timed.items()]


def without_memory(
    session: Session, group: Group, tasks: Sequence[PlannedTask]
) -> list[PlannedTask]:
    """Return the tasks of a group that ran out of memory before an interrupted run is continued.

    They may fit if they run alone. The tasks that will run anyway, `tasks`, are left out.
    """
    if len(group.tasks) == 1:
        return []
    found = []
    for task in group.tasks:
        result = session.found(task.row, **task.kind)
        if result is not None and result.status == "out of memory" and task not in tasks:
            found.append(task)
    return found


def _is_done(session: Session, task: PlannedTask, found: Result) -> bool:
    """Return whether a timed row is finished.

    A row is finished if its utilization has been measured, or if this measurement has failed. The
    utilization is measured last. PyTorch's own schedules have no utilization, so their rows are
    finished if they have run as many rounds as any group runs.
    """
    if task.engine in TORCH_ENGINES:
        least = min(rounds_wanted(session), session.scale.least_steps)
        return len(found.samples.get("step_time", ())) >= least
    return "bubble" in found.values or "utilization_problem" in found.values


def warmup_steps(session: Session, task: PlannedTask) -> int:
    """Return how many steps of a task (a row, and how it runs) run before the first timed one."""
    if task.emulated:
        return session.scale.warmup
    # The publication does not time the first epochs of the row either.
    skipped = task.row.skip_epochs * task.row.steps_per_epoch
    return max(session.scale.warmup, skipped)
