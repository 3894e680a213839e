"""Run a speed experiment: emulate its rows, and measure rows for which there are enough devices.

In each *round*, every row (configuration) of a group runs one step. So slow phases of the machine
affect all rows. The record has the time of every step, because rows are compared round by round.
Devices are synchronized before and after a measured step.

A round is *disturbed* if other programs use too much of the machine (`reproduce.machine.load`). As
long as there is time, further rounds are run in place of disturbed rounds. If the time runs out,
the record (the file of results) keeps the disturbed rounds. Every table marks the rows that ran in
them.
"""

from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing, suppress
from functools import partial
from random import Random
from statistics import median
from time import monotonic

import torch

from reproduce.machine.clocks import clocks
from reproduce.run.emulation import Emulation, memory_needed, shortened
from reproduce.run.engines.engines import check_same
from reproduce.run.engines.failure import Failure, explain
from reproduce.run.engines.processes import Processes
from reproduce.run.groups import (
    Group,
    PlannedTask,
    SoFar,
    further_rounds,
    groups_of,
    least_steps,
    remaining,
    rounds_wanted,
    takes_too_long,
    time_is_over,
    warmup_steps,
    without_memory,
)
from reproduce.run.progress import duration
from reproduce.run.rounds import Rounds, Steps
from reproduce.run.session import GroupDone, Session
from reproduce.run.timed import MeasuredSteps, time_step, watch, watched
from reproduce.run.training import FakeData, Training, work_of
from reproduce.run.turns import turns

# Rounds that other programs disturb are run again. But all rounds together are at most this many
# times the number of wanted rounds.
MOST_ROUNDS = 2
# If the first round of a group takes longer than these seconds, a table is shown after this round.
PREVIEW_AFTER = 10.0


def run_speed(session: Session) -> Iterator[GroupDone]:
    """Run the groups of rows (configurations) one after another.

    At the end of a group, yield its name and True, so that the caller shows its table. If the first
    round of a group takes long, also yield (name, False) after this round, to preview the table.
    Rows that ran out of memory run again at the end of their group, one at a time.

    If an interrupted run is continued, finished groups are kept. The group that was interrupted
    continues, and its models are partitioned as before. But the group starts again if one of its
    rows has no result, or a result that other programs disturbed.
    """
    session.rounds = _next_round(session)
    for group in groups_of(session):
        tasks = remaining(session, group)
        alone = without_memory(session, group, tasks)
        if tasks:
            yield from _run_tasks(session, group, tasks)
        for task in alone:
            session.free()
            yield from _run_in_turn(session, group, [task], paired=False)
        session.finish(group.name)
        yield group.name, True


def _next_round(session: Session) -> int:
    """Return the number of the next round: one more than the highest number in the record."""
    last = -1
    for result in session.recorder.results.values():
        numbers = result.samples.get("round", ())
        last = max([last, *numbers])
    return 1 + int(last)


def _run_tasks(session: Session, group: Group, tasks: list[PlannedTask]) -> Iterator[GroupDone]:
    """Run the rows of a group alternately. Then rerun each row that ran out of memory, alone."""
    out_of_memory = yield from _run_in_turn(session, group, tasks)
    if len(tasks) > 1:
        for task in out_of_memory:
            session.free()
            yield from _run_in_turn(session, group, [task], paired=False)


def _run_in_turn(
    session: Session, group: Group, tasks: list[PlannedTask], *, paired: bool = True
) -> Generator[GroupDone, None, list[PlannedTask]]:
    """Run rows alternately, then measure their utilization. Return the rows that ran out of memory.

    Set `paired` to false if a row runs alone. Then the record does not number the row's rounds,
    because no other row ran in them. At the end, the memory of all tensors has been freed.
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
    """Measures a group of rows (configurations to compare), by running their steps alternately."""

    def __init__(self, session: Session, group: Group, paired: bool, processes: ExitStack) -> None:
        self.session = session
        self.group = group
        self.paired = paired
        self.processes = processes
        self.running: dict[PlannedTask, Steps] = {}
        self.rounds = Rounds()
        # Maps the name of each row to the median seconds of its warm-up steps.
        self.emulated_seconds: dict[str, float] = {}
        self.losses: dict[str, list[float]] = {}  # of each row with the first engine
        self.out_of_memory: list[PlannedTask] = []
        self.round_text = ""  # which round runs, for the progress display
        self.row_number = 0

    def add(self, tasks: list[PlannedTask]) -> None:
        """Build the models of rows, which share the same data, and run the rows' warm-up steps."""
        rows = [shortened(task.row) if task.emulated else task.row for task in tasks]
        data = FakeData(rows, self.session.seed)
        for number, task in enumerate(tasks, 1):
            self._add(task, data, f"row {number} of {len(tasks)}: {task}")

    def _add(self, task: PlannedTask, data: FakeData, which: str) -> None:
        session = self.session
        job = session.job(task)
        try:
            session.start(f"building, {which}", job, typical=False)
            steps = self._built(task, data)
            name = task.row.name
            if isinstance(steps, MeasuredSteps):
                self.losses.setdefault(name, steps.losses)
            for _ in range(warmup_steps(session, task)):
                session.start(f"warm-up, {which}", job)
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
        """Build the model of a row and all else that it needs; return an object that runs steps."""
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
        """Run a step of a row; raise `Error` if the row had other losses with another engine."""
        steps.run()
        if isinstance(steps, MeasuredSteps):
            check_same(steps.losses, self.losses[task.row.name], str(task))

    def worth_measuring(self, tasks: list[PlannedTask]) -> list[PlannedTask]:
        """Return those tasks that are worth measuring, and record the others as not measured.

        A task (a row, and how it runs) is not worth measuring if it would take too long.
        """
        worth = []
        for task in tasks:
            if task.emulated:
                continue
            seconds = self.emulated_seconds.get(task.row.name)
            if task.before:  # the interrupted run has measured it
                worth.append(task)
            elif seconds is not None and takes_too_long(self.session, self.group, task, seconds):
                self._skip(task, seconds)
            else:
                worth.append(task)
        return worth

    def _skip(self, task: PlannedTask, seconds: float) -> None:
        """Record that a row is not measured, because this would take too long.

        Args:
            task: The row, and how it runs.
            seconds: The time of one step of the row.
        """
        session = self.session
        steps = least_steps(session, task)
        reason = (
            f"not measured: {steps} steps, with the warm-up, would take about "
            f"{duration(seconds * steps)}; --no-emulate measures it nevertheless"
        )
        session.put(task.row, **task.kind, status="not run", reason=reason)
        session.finish(task)

    def run_rounds(self) -> Iterator[int]:
        """Run rounds until enough of them were undisturbed, or until the group's time is over.

        In a round, each row runs one step. Between rounds, yield the number of finished rounds.
        """
        session = self.session
        wanted = self._rounds_wanted()
        most = MOST_ROUNDS * wanted
        least = min(wanted, session.scale.least_steps)
        session.load.begin()
        started = monotonic()
        steps = {task: partial(self._step, task) for task in self.running}
        order = Random(session.seed)
        rounds = turns(steps, most, order)
        self._expect(SoFar())
        try:
            for done, _ in enumerate(rounds, 1):
                undisturbed = self._judge_round(least)
                session.rounds += 1
                self._record()
                if undisturbed >= wanted or done == most or not self.running:
                    break
                seconds = monotonic() - started
                if time_is_over(session, self.group, seconds) and done >= session.scale.least_steps:
                    break
                self._expect(SoFar(done, done - undisturbed, seconds))
                yield done
        finally:
            self._judge_round(least)  # if interrupted: of the round that was not completed
            self._record()
            session.progress.stop()

    def _rounds_wanted(self) -> int:
        """Return how many more undisturbed rounds to run, after those of an interrupted run."""
        return max(1, rounds_wanted(self.session) - self._rounds_before())

    def _rounds_before(self) -> int:
        """Return the number of rounds of the interrupted run that this run continues, or 0."""
        before = [len(task.before.get("step_time", ())) for task in self.running]
        return min(before, default=0)

    def _expect(self, so_far: SoFar) -> None:
        """Tell the progress display how many rounds will probably run after the rounds `so_far`."""
        session = self.session
        before = self._rounds_before()
        jobs = {session.job(task): task for task in self.running}
        seconds = session.progress.step_seconds(jobs)
        if so_far.rounds:
            seconds = so_far.seconds / so_far.rounds
        most = MOST_ROUNDS * self._rounds_wanted() - so_far.rounds
        so_far = so_far._replace(rounds=before + so_far.rounds)
        further = further_rounds(session, self.group, seconds, so_far)
        further = max(1, min(further, most))
        self.round_text = f"round {so_far.rounds + 1} of {so_far.rounds + further}"
        if so_far.disturbed:
            self.round_text += f" ({so_far.disturbed} disturbed)"
        self.row_number = 0
        for job, task in jobs.items():
            session.progress.expect(job, further + task.watching_steps)

    def _judge_round(self, least: int) -> int:
        """Decide whether other programs disturbed the round that ends now.

        Return the number of undisturbed rounds so far. If it is at least `least`, these rounds are
        enough, so remove the disturbed ones.
        """
        session = self.session
        session.tell_others()
        shares = session.load.round()
        if shares:
            shares |= clocks(session.devices)
        self.rounds.end(session.rounds, shares, self.running)
        good = self.rounds.undisturbed()
        if len(good) >= least:
            self.rounds.keep_only(good, self.running)
        return len(good)

    def _step(self, task: PlannedTask) -> None:
        """Run one step of a row. If the row fails, record this, and do not run the row again."""
        if task not in self.running:
            return
        session = self.session
        self.row_number += 1
        which = f"row {self.row_number} of {len(self.running)}"
        session.start(f"{self.round_text}, {which}: {task}", session.job(task))
        try:
            self._run_step(task, self.running[task])
        except Exception as error:
            del self.running[task]
            self._fail(task, explain(error))

    def watch(self) -> None:
        """Measure and record how busy the devices of each row are (utilization and bubble).

        If there is a function `session.trace`, call it with the timeline of each row.
        """
        session = self.session
        for number, (task, steps) in enumerate(self.running.items(), 1):
            which = f"row {number} of {len(self.running)}: {task}"
            session.start(f"utilization, {which}", session.job(task), typical=False)
            values, timeline = steps.watch()
            session.add_values(task.row, values, **task.kind)
            if timeline is not None and session.trace is not None:
                session.trace(session.experiment.name, task.title, timeline)
        session.progress.stop()

    def _fail(self, task: PlannedTask, failure: Failure) -> None:
        """Record why a row failed. If memory ran out, note the row, so that it reruns alone."""
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
        """Add the samples of all rows so far to the record, and write the record to its file."""
        session = self.session
        for task, steps in self.running.items():
            if not steps.runs:
                continue
            config = steps.config if isinstance(steps, Emulation) else steps.row.config()
            left_out = task.left_out + self.rounds.left_out
            result = session.result(
                task.row,
                **task.kind,
                config=config,
                samples=self.rounds.samples(task, steps, numbered=self.paired),
                values={"disturbed_rounds": left_out} if left_out else {},
            )
            session.recorder.put(result)
        session.recorder.save()
