"""Decide which rows of a speed experiment run, how, in which groups, and for how long.

A row is a configuration of the experiment. It is measured if this machine has enough devices. It is
emulated if it needs at most as many devices as the option `--emulate` says; so it can be both.

The rows of a group are compared with each other, so their steps run alternately.
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
        engine: The engine that runs a measured row.
        before: The samples from before the interruption, if an interrupted run is continued.
    """

    row: Row
    emulated: bool
    engine: Engine = "threads"
    before: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def continued(self, found: Result) -> "PlannedTask":
        """Return a copy of the task with the samples and the balance of an earlier result."""
        balance = found.config.get("balance")
        row = replace(self.row, balance=balance and tuple(balance))
        return replace(self, row=row, before=found.samples)

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
        """Return how many steps watch how busy the devices are, after the timed steps."""
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
        """Return how the row is run, as keyword arguments for methods of `Session`."""
        return {"emulated": self.emulated, "engine": self.engine}

    @property
    def work(self) -> float:
        """Return an estimate of how much a step costs, in the unit of `Row.work`."""
        if self.emulated:
            return shortened(self.row).work()
        return self.row.work() / self.row.devices


class Group(NamedTuple):
    """A group of rows that are compared with each other, and the group's time limit in seconds.

    Steps of the rows run alternately, so that slow phases of the machine affect all rows equally.
    With the option `--steps`, the limit does not end the group. But it always decides which rows
    take too long to be measured.
    """

    name: str
    tasks: list[PlannedTask]
    limit: float


def groups_of(session: Session) -> list[Group]:
    """Return all groups of the experiment. If no row of a group can run here, it has no tasks."""
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
    """Return a task for each way in which a row can run here: measured or emulated."""
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
    """Return the time limit of a group in seconds, per unit of the group's work (estimated cost).

    The scale of the run, such as `small`, has a time limit. The groups without extra rows share
    this time in proportion to their work. A group with extra rows gets additional time, at the same
    rate.
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
    """Return, for each task that counts towards the time limit, the estimated cost of a step."""
    return sum(task.work for task in _counted(tasks))


def _counted(tasks: list[PlannedTask]) -> list[PlannedTask]:
    """Return the tasks whose estimated cost determines the time limit of their group.

    If the group has emulated tasks, only these count. Measured tasks do not count then, because
    they may be left out for taking too long.
    """
    emulated = [task for task in tasks if task.emulated]
    return emulated or tasks


def plan_speed(session: Session) -> None:
    """Record which rows will run, and why others will not; plan the steps in the progress display.

    If an interrupted run is continued, its results are kept.
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
        _plan_steps(session, group, remaining(session, group))


def _plan_measured(session: Session, row: Row, engine: Engine) -> None:
    """Record that a row will be measured, or why it cannot be measured."""
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

    Building the model of a task counts as one step. For a measured row, there is another step,
    which watches how busy the devices are.
    """
    guesses: dict[PlannedTask, float | None] = {}
    skipped: set[PlannedTask] = set()
    emulated = {task.row.name for task in tasks if task.emulated}
    seconds: float | None = 0.0  # of a round
    for task in tasks:
        guess = session.guess(task.row, task.work, **task.kind)
        guesses[task] = guess
        is_judged = not task.emulated and task.row.name in emulated
        if is_judged and guess is not None and takes_too_long(session, group, guess):
            skipped.add(task)
        else:
            seconds = None if seconds is None or guess is None else seconds + guess
    before = min((len(task.before.get("step_time", ())) for task in tasks), default=0)
    rounds = further_rounds(session, group, seconds, SoFar(before))
    for task, guess in guesses.items():
        steps = 1 + warmup_steps(session, task) + rounds + task.watching_steps
        if task in skipped:
            steps = 0
        session.progress.plan(session.job(task), steps, guess, session.job(group.name))


def takes_too_long(session: Session, group: Group, seconds: float) -> bool:
    """Return whether measuring a row takes too long, if a step takes `seconds`."""
    scale = session.scale
    return seconds * (scale.least_steps + scale.warmup) > LARGEST_SHARE * group.limit


def rounds_wanted(session: Session) -> int:
    """Return how many undisturbed rounds a group runs if there is no time limit."""
    return session.steps or session.scale.steps


def time_is_over(session: Session, group: Group, seconds: float) -> bool:
    """Return whether a group that has run for `seconds` has used up its time limit."""
    return session.steps is None and seconds > group.limit


class SoFar(NamedTuple):
    """The rounds that a group has run: how many, how many of them disturbed, and their seconds."""

    rounds: int = 0
    disturbed: int = 0
    seconds: float = 0.0


def further_rounds(session: Session, group: Group, seconds: float | None, so_far: SoFar) -> int:
    """Return how many more rounds a group will probably run, if a round takes `seconds`.

    `seconds` is None if it is not known. Disturbed rounds are run again.
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

    - If a task has no result, or if other programs disturbed its result, the group starts again:
      return all tasks.
    - If the group is finished, return no task.
    - Otherwise, return the tasks that have timed steps already, to add more steps to them.
    """
    timed: dict[PlannedTask, Result] = {}
    for task in group.tasks:
        found = session.found(task.row, **task.kind)
        if found is None or found.disturbed:
            return group.tasks
        if found.samples:
            timed[task] = found
    if all(_is_done(task, found) for task, found in timed.items()):
        return []
    return [task.continued(found) for task, found in timed.items()]


def _is_done(task: PlannedTask, found: Result) -> bool:
    """Return whether a timed row is finished: whether its last value, the utilization, is known."""
    if task.engine in TORCH_ENGINES:
        return True  # PyTorch's own schedules have no utilization
    return "bubble" in found.values or "utilization_problem" in found.values


def warmup_steps(session: Session, task: PlannedTask) -> int:
    """Return how many steps of a task run before the first step that is timed."""
    if task.emulated:
        return session.scale.warmup
    # The publication does not time the first epochs of the row either.
    skipped = task.row.skip_epochs * task.row.steps_per_epoch
    return max(session.scale.warmup, skipped)
