"""Run a speed experiment: emulate its rows, and measure rows for which there are enough devices.

In each *round*, every row (configuration) of a group runs one step. So slow phases of the machine
affect all rows. The record has the time of every step, because rows are compared round by round.
Devices are synchronized before and after a measured step.

A round is *disturbed* if other programs use too much of the machine (`reproduce.machine.load`). As
long as there is time, further rounds are run in place of disturbed rounds. If the time is over
first, the record keeps the disturbed rounds, and all tables mark their rows.
"""

from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing, suppress
from functools import partial
from random import Random
from statistics import median
from time import monotonic

import torch

from reproduce.experiments.row import Row
from reproduce.records.record import Engine
from reproduce.run.emulation import Emulation, memory_needed, shortened
from reproduce.run.engines.engines import check_same, why_not
from reproduce.run.engines.failure import Failure, explain
from reproduce.run.engines.processes import Processes
from reproduce.run.groups import Group, PlannedTask, groups_of, remaining, warmup_steps
from reproduce.run.progress import duration
from reproduce.run.rounds import Rounds, Steps
from reproduce.run.session import GroupDone, Session
from reproduce.run.timed import MeasuredSteps, time_step, watch, watched
from reproduce.run.training import FakeData, Training, work_of
from reproduce.run.turns import turns

# If measuring a row takes more than this share of its group's time limit, the row is only emulated.
LARGEST_SHARE = 0.25
# Because disturbed rounds are run again, there can be more rounds than were asked for: at most this
# number of times as many.
MOST_ROUNDS = 2
# If the first round of a group takes longer than these seconds, a table is shown after this round.
PREVIEW_AFTER = 10.0


def plan_speed(session: Session) -> None:
    """Record which rows will run, and why others will not; plan the steps in the progress display.

    If an interrupted run is continued, its results are kept.
    """
    for row in session.scale.rows:
        for engine in session.engines:
            emulated_instead = engine == "threads" and row.devices <= session.emulate
            if not emulated_instead and session.found(row, engine=engine) is None:
                _plan_measured(session, row, engine)

    rounds = session.steps or session.scale.steps
    for group in groups_of(session):
        group_job = session.job(group.name)
        for task in group.tasks:
            if session.found(task.row, **task.kind) is None:
                session.plan(task.row, **task.kind)
            steps = warmup_steps(session, task) + rounds
            job = session.job(task)
            session.progress.plan(job, steps, task.work, group_job, group.limit)


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


def run_speed(session: Session) -> Iterator[GroupDone]:
    """Run the groups of rows one after another.

    At the end of a group, yield its name and True. If the first round of a group takes long, also
    yield the name and False after this round. Rows that ran out of memory run again at the end of
    their group, one at a time.

    If an interrupted run is continued, finished groups are kept. The group that was interrupted
    continues with the same balances. But it starts again if a row of it has no result, or has a
    result that other programs disturbed.
    """
    session.rounds = _next_round(session)
    for group in groups_of(session):
        tasks = remaining(session, group)
        if tasks:
            yield from _run_tasks(session, group, tasks)
        session.finish(group.name)
        yield group.name, True


def _next_round(session: Session) -> int:
    """Return the number of the next round, which is one more than the last one in the record."""
    last = -1
    for result in session.recorder.results.values():
        numbers = result.samples.get("round", ())
        last = max([last, *numbers])
    return 1 + int(last)


def _run_tasks(session: Session, group: Group, tasks: list[PlannedTask]) -> Iterator[GroupDone]:
    """Run rows alternately. Then run the rows that ran out of memory again, one at a time."""
    out_of_memory = yield from _run_in_turn(session, group, tasks)
    if len(tasks) > 1:
        for task in out_of_memory:
            session.free()
            yield from _run_in_turn(session, group, [task], paired=False)


def _run_in_turn(
    session: Session, group: Group, tasks: list[PlannedTask], *, paired: bool = True
) -> Generator[GroupDone, None, list[PlannedTask]]:
    """Run rows alternately, then measure their utilization. Return the rows that ran out of memory.

    Set `paired` to false if a row runs alone. Then the record does not number its rounds, because
    there is no other row to compare it with. At the end, no tensors stay alive.
    """
    started = monotonic()
    with ExitStack() as processes:
        run = _GroupRun(session, group, paired, processes)
        # Emulations come first, because their times tell how long it takes to measure the rows.
        run.add([task for task in tasks if task.emulated])
        run.add(run.worth_measuring(tasks))
        for done in run.run_rounds():
            seconds = monotonic() - started
            if paired and done == 1 and seconds > PREVIEW_AFTER:
                session.progress.say(
                    "after 1 round; this table comes again when all rounds are done:"
                )
                yield group.name, False
        run.watch()
    return run.out_of_memory


class _GroupRun:
    """The run of a group: it builds the rows, runs them alternately, and records the steps."""

    def __init__(self, session: Session, group: Group, paired: bool, processes: ExitStack) -> None:
        self.session = session
        self.group = group
        self.paired = paired
        self.processes = processes
        self.running: dict[PlannedTask, Steps] = {}
        self.rounds = Rounds()
        self.emulated_seconds: dict[str, float] = {}  # row's name -> median of its warm-up steps
        self.losses: dict[str, list[float]] = {}  # row's name -> losses with its first engine
        self.out_of_memory: list[PlannedTask] = []

    def add(self, tasks: list[PlannedTask]) -> None:
        """Build rows, which all train on the same data, and run the warm-up steps of each row."""
        rows = [shortened(task.row) if task.emulated else task.row for task in tasks]
        data = FakeData(rows, self.session.seed)
        for task in tasks:
            self._add(task, data)

    def _add(self, task: PlannedTask, data: FakeData) -> None:
        session = self.session
        try:
            session.start(f"{task}, building")
            steps = self._built(task, data)
            name = task.row.name
            if isinstance(steps, MeasuredSteps):
                self.losses.setdefault(name, steps.losses)
            for _ in range(warmup_steps(session, task)):
                session.start(f"{task}, warm-up", session.job(task))
                self._run_step(task, steps)
            if task.emulated and steps.runs:
                seconds = steps.samples()["step_time"]
                self.emulated_seconds[name] = median(seconds)
            steps.runs.clear()
        except Exception as error:
            self._fail(task, explain(error))
        else:
            self.running[task] = steps
            self.rounds.of_steps[task] = []
        finally:
            session.progress.stop()

    def _built(self, task: PlannedTask, data: FakeData) -> Steps:
        """Build a row, so that it is ready to run."""
        session = self.session
        row, devices, balancer, seed = task.row, session.devices, session.balancer, session.seed
        if task.emulated:
            return Emulation(row, devices, data, balancer, seed, session.link(row))
        if task.engine == "threads":
            training = Training(row, devices, data, balancer, seed)
            timed = partial(time_step, training, devices)
            return MeasuredSteps(training.row, timed, partial(watch, training, devices))

        torch.manual_seed(seed)
        row = balancer.balanced(row, row.sized.layers(), data)
        processes = Processes(row.devices)
        self.processes.enter_context(closing(processes))
        processes.make(task.engine, partial(work_of, row, seed))
        if task.engine != "ranks":
            return MeasuredSteps(row, processes.step)
        return MeasuredSteps(row, processes.step, partial(watched, processes.record))

    def _run_step(self, task: PlannedTask, steps: Steps) -> None:
        """Run one step; raise `Error` if the row's losses differ from another engine's losses."""
        steps.run()
        if isinstance(steps, MeasuredSteps):
            check_same(steps.losses, self.losses[task.row.name], str(task))

    def worth_measuring(self, tasks: list[PlannedTask]) -> list[PlannedTask]:
        """Return the tasks to measure. Tasks that would take too long are recorded as skipped."""
        worth = []
        for task in tasks:
            if task.emulated:
                continue
            seconds = self._seconds_if_too_long(task)
            if seconds is None:
                worth.append(task)
            else:
                self._skip(task, seconds)
        return worth

    def _seconds_if_too_long(self, task: PlannedTask) -> float | None:
        """Return the seconds of a row's step if they are too many to measure the row, else None."""
        scale = self.session.scale
        seconds = self.emulated_seconds.get(task.row.name)
        if seconds is None:
            return None
        total = seconds * (scale.least_steps + scale.warmup)
        return seconds if total > LARGEST_SHARE * self.group.limit else None

    def _skip(self, task: PlannedTask, seconds: float) -> None:
        """Record that a row is not measured, because its step takes too many seconds."""
        reason = (
            f"not measured: a step would take about {duration(seconds)}; "
            "--steps K measures it nevertheless"
        )
        session = self.session
        session.put(task.row, **task.kind, status="not run", reason=reason)
        session.finish(task)

    def run_rounds(self) -> Iterator[int]:
        """Run as many undisturbed rounds as are wanted, or until the group's time is over.

        Between rounds, yield the number of finished rounds.
        """
        session = self.session
        wanted = self._rounds_wanted()
        most = MOST_ROUNDS * wanted
        least = min(wanted, session.scale.least_steps)
        session.progress.begin(session.job(self.group.name))
        session.load.begin()
        started = monotonic()
        steps = {task: partial(self._step, task, wanted) for task in self.running}
        order = Random(session.seed)
        rounds = turns(steps, most, order)
        try:
            for done, _ in enumerate(rounds, 1):
                undisturbed = self._judge_round(least)
                session.rounds += 1
                self._record()
                if undisturbed >= wanted or done == most or not self.running:
                    break
                seconds = monotonic() - started
                if seconds > self.group.limit and done >= session.scale.least_steps:
                    break
                yield done
        finally:
            self._judge_round(wanted)  # if interrupted: of the round that was not completed
            self._record()
            session.progress.stop()

    def _rounds_wanted(self) -> int:
        """Return how many undisturbed rounds to run, beyond those of the run that is continued."""
        before = [len(task.before.get("step_time", ())) for task in self.running]
        wanted = self.session.steps or self.session.scale.steps
        return max(1, wanted - min(before, default=0))

    def _judge_round(self, least: int) -> int:
        """Measure how much other programs used the machine in the round that ends now.

        Return the number of undisturbed rounds so far. If it is at least `least`, remove the
        disturbed rounds.
        """
        session = self.session
        session.tell_others()
        self.rounds.end(session.rounds, session.load.round(), self.running)
        good = self.rounds.undisturbed()
        if len(good) >= least:
            self.rounds.keep_only(good, self.running)
        return len(good)

    def _step(self, task: PlannedTask, wanted: int) -> None:
        """Run one step of a row. If the row fails, it is not run again."""
        if task not in self.running:
            return
        session = self.session
        number = len(self.rounds.of_steps[task]) + 1
        which = f"round {number} of {wanted}" if number <= wanted else "a disturbed round again"
        session.start(f"{task}, {which}", session.job(task))
        try:
            self._run_step(task, self.running[task])
        except Exception as error:
            del self.running[task]
            self._fail(task, explain(error))

    def watch(self) -> None:
        """Record each row's utilization and bubble, and pass its timeline to `session.trace`."""
        session = self.session
        for task, steps in self.running.items():
            session.start(f"{task}, utilization", session.job(task))
            values, timeline = steps.watch()
            session.add_values(task.row, values, **task.kind)
            if timeline is not None and session.trace is not None:
                session.trace(session.experiment.name, task.title, timeline)
        session.progress.stop()

    def _fail(self, task: PlannedTask, failure: Failure) -> None:
        """Record a row's failure. Remember a row that ran out of memory: it may fit alone."""
        session = self.session
        reason = failure.reason
        if failure.status == "out of memory":
            self.out_of_memory.append(task)
            if task.emulated:
                with suppress(Exception):  # the failure is recorded even if this count fails
                    reason = f"out of memory: {memory_needed(task.row)}"
        session.put(task.row, **task.kind, status=failure.status, reason=reason)
        session.finish(task)

    def _record(self) -> None:
        """Record the steps of all rows so far, and write the record to its file."""
        session = self.session
        for task, steps in self.running.items():
            if not steps.runs:
                continue
            config = steps.config if isinstance(steps, Emulation) else steps.row.config()
            left_out = self.rounds.left_out
            result = session.result(
                task.row,
                **task.kind,
                config=config,
                samples=self.rounds.samples(task, steps, numbered=self.paired),
                values={"disturbed_rounds": left_out} if left_out else {},
            )
            session.recorder.put(result)
        session.recorder.save()
