"""Run a speed experiment: measure the rows for which there are enough devices, and emulate all rows.

A round is one step of every row of a group, measured and emulated, in turn, so that slow phases of the machine affect
all rows. Devices are synchronized before and after a measured step. The record has the time of every step, because rows
are compared within rounds. A round in which others had too much of the machine (`reproduce.machine.load`) is run again,
while there is time; if there is none, the record keeps it, and its rows are marked wherever they are shown.
"""

import contextlib
import math
import random
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch

from reproduce.experiments.row import PUBLISHED_BALANCE, Row
from reproduce.machine.load import Shares, too_busy
from reproduce.records.record import TORCH_ENGINES, Engine, Result
from reproduce.run.emulation import Emulation, memory_needed, shortened
from reproduce.run.engines.engines import check_same, why_not
from reproduce.run.engines.processes import Processes
from reproduce.run.failure import Failure, explain
from reproduce.run.progress import duration
from reproduce.run.session import Session
from reproduce.run.timed import MeasuredSteps, time_step, watch, watched
from reproduce.run.training import FakeData, Training, work_of
from reproduce.run.turns import turns

Steps = MeasuredSteps | Emulation
LARGEST_SHARE = (
    0.25  # of a group's time limit; a row that would take more to measure is only emulated
)
MOST_ROUNDS = (
    2  # times as many as were asked for, where no time limit ends what is disturbed and run again
)
PREVIEW_AFTER = 10.0  # seconds; a group whose first round ends later shows a table after it


@dataclass(frozen=True, eq=False)
class PlannedTask:
    """A row to run, and how: measured with an engine, or emulated. `before`: samples of a run that was broken off."""

    row: Row
    emulated: bool
    engine: Engine = "threads"
    before: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def again(self, found: Result) -> "PlannedTask":
        """Return the task with the samples and the balance that were found before."""
        balance = found.config.get("balance")
        return replace(
            self, row=replace(self.row, balance=balance and tuple(balance)), before=found.samples
        )

    def __str__(self) -> str:
        measured = "measured" if self.engine == "threads" else f"measured with {self.engine}"
        return f"{self.row.name}, {'emulated' if self.emulated else measured}"

    @property
    def kind(self) -> dict[str, Any]:
        """Give how it is run, as keyword arguments for the session's methods."""
        return {"emulated": self.emulated, "engine": self.engine}

    @property
    def work(self) -> float:
        """Guess the relative cost of a step, as `Row.work` does."""
        return shortened(self.row).work() if self.emulated else self.row.work() / self.row.devices


class Group(NamedTuple):
    """Hold rows that are compared and so run in turn, and the time limit of their rounds in seconds."""

    name: str
    tasks: list[PlannedTask]
    limit: float


def plan_speed(session: Session) -> None:
    """Tell the progress display how many steps are to come, and record why rows are left out."""
    for row in session.scale.rows:
        lacking = row.devices > session.devices.count
        for engine in session.engines:
            left_out = engine != "threads" or row.devices > session.emulate
            if left_out and session.recorded(row, engine=engine).status == "interrupted":
                why = (
                    f"needs {row.devices} devices"
                    if lacking
                    else why_not(engine, row, session.devices)
                )
                status = "needs devices" if lacking else "not run" if why else "interrupted"
                session.recorder.put(session.result(row, engine=engine, status=status, reason=why))
    for group in _groups(session):
        for task in group.tasks:
            rounds = session.steps or session.scale.steps
            steps = _warmup(session, task) + rounds
            session.recorder.put(session.recorded(task.row, **task.kind))
            session.progress.plan(
                session.job(task), steps, task.work, session.job(group.name), group.limit
            )


def run_speed(session: Session) -> Iterator[tuple[str, bool]]:
    """Run one group after another. Yield its name and False after its first round, and True when it is done.

    A row that ran out of memory runs again afterwards, without the others. If the run was broken off before, groups
    that were done are kept; the next one goes on, in the same balance, or begins anew if a row of it has no good step.
    """
    numbers = [
        number
        for each in session.recorder.results.values()
        for number in each.samples.get("round", ())
    ]
    session.rounds = 1 + int(max(numbers, default=-1))
    for group in _groups(session):
        tasks = _left(session, group)
        out_of_memory = (yield from _run_all(session, group, tasks)) if tasks else []
        for task in out_of_memory if len(tasks) > 1 else []:
            session.free()
            yield from _run_all(session, group, [task], paired=False)
        session.progress.finish(session.job(group.name))
        yield group.name, True


def _left(session: Session, group: Group) -> list[PlannedTask]:
    """Return what is to run of a group: all, or if each row has good steps, each to go on; nothing if it was done."""
    found = {task: session.recorded(task.row, **task.kind) for task in group.tasks}
    if any(each.status == "interrupted" or each.disturbed for each in found.values()):
        return group.tasks
    timed = {task: each for task, each in found.items() if each.samples}
    watched = [
        each for each in timed.values() if each.values.keys() & {"bubble", "utilization_problem"}
    ]
    done = len(watched) == sum(task.engine not in TORCH_ENGINES for task in timed)
    return [] if done else [task.again(each) for task, each in timed.items()]


def _groups(session: Session) -> list[Group]:
    """Return the groups to run. A group has no tasks if there are too few devices for all its rows."""
    groups: dict[str, list[PlannedTask]] = {}
    for row in session.scale.rows:
        tasks = groups.setdefault(row.group, [])
        if row.devices <= session.devices.count and row.configuration != PUBLISHED_BALANCE:
            engines = [
                engine
                for engine in session.engines
                if why_not(engine, row, session.devices) is None
            ]
            tasks.extend(PlannedTask(row, emulated=False, engine=engine) for engine in engines)
        if row.devices <= session.emulate:
            tasks.append(PlannedTask(row, emulated=True))
    # Groups share the scale's time in proportion to their work; extra rows have more time on top. If rows are emulated,
    # only the emulated ones count, because some rows would take too long to measure.
    kinds = {
        name: [task for task in tasks if task.emulated] or tasks for name, tasks in groups.items()
    }
    works = {name: sum(task.work for task in tasks) for name, tasks in kinds.items()}
    usual = sum(
        works[name] for name, tasks in kinds.items() if not any(task.row.extra for task in tasks)
    )
    seconds = (session.scale.seconds if session.steps is None else None) or math.inf
    per_work = seconds / (usual or sum(works.values()) or 1)
    return [
        Group(name, tasks, per_work * works[name] if tasks else math.inf)
        for name, tasks in groups.items()
    ]


def _warmup(session: Session, task: PlannedTask) -> int:
    skipped = (
        task.row.skip_epochs * task.row.steps_per_epoch
    )  # epochs that the publication does not time either
    return session.scale.warmup if task.emulated else max(session.scale.warmup, skipped)


def _run_all(
    session: Session, group: Group, tasks: Sequence[PlannedTask], *, paired: bool = True
) -> Generator[tuple[str, bool], None, list[PlannedTask]]:
    """Run rows in turn, then measure utilization; return those that ran out of memory. It leaves no tensors behind."""
    started = time.monotonic()
    with contextlib.ExitStack() as processes:
        timing = _Timing(session, group, paired, processes)
        timing.add(
            [task for task in tasks if task.emulated]
        )  # first: their times tell how long the others will take
        timing.add(
            [task for task in tasks if not task.emulated and timing.is_worth_measuring(task)]
        )
        for done in timing.run():
            if paired and done == 1 and time.monotonic() - started > PREVIEW_AFTER:
                session.progress.say(
                    "after 1 round; this table comes again when all rounds are done:"
                )
                yield group.name, False
        timing.watch()
    return timing.out_of_memory


class _Timing:
    """Run rows in turn, and record every step after each round.

    Without `paired`, steps belong to no round: a row runs alone.
    """

    def __init__(
        self, session: Session, group: Group, paired: bool, processes: contextlib.ExitStack
    ) -> None:
        self.session, self.group, self.paired, self.processes = session, group, paired, processes
        self.running: dict[PlannedTask, Steps] = {}
        self.rounds: dict[PlannedTask, list[int]] = {}  # the round of each step
        self.shares: dict[int, Shares] = {}  # what others had in each round, if known
        self.left_out = 0  # rounds
        self.emulated_seconds: dict[str, float] = {}  # of a warm-up step, by the row's name
        self.losses: dict[
            str, list[float]
        ] = {}  # of each measured row on its first engine, by the row's name
        self.out_of_memory: list[PlannedTask] = []

    def add(self, tasks: Sequence[PlannedTask]) -> None:
        """Build rows, which share their data, and run the warm-up steps of each."""
        data = FakeData(
            [shortened(task.row) if task.emulated else task.row for task in tasks],
            self.session.seed,
        )
        for task in tasks:
            self._add(task, data)

    def _add(self, task: PlannedTask, data: FakeData) -> None:
        session = self.session
        try:
            session.start(f"{task}, building")
            made = self.make(task, data)
            if isinstance(made, MeasuredSteps):
                self.losses.setdefault(task.row.name, made.losses)
            for _ in range(_warmup(session, task)):
                session.start(f"{task}, warm-up", session.job(task))
                self.run_one(task, made)
            if task.emulated and made.runs:
                self.emulated_seconds[task.row.name] = median(made.samples()["step_time"])
            made.runs.clear()
        except Exception as error:
            self.fail(task, explain(error))
        else:
            self.running[task], self.rounds[task] = made, []
        finally:
            session.progress.stop()

    def make(self, task: PlannedTask, data: FakeData) -> Steps:
        """Make a row ready to run."""
        session = self.session
        shared = task.row, session.devices, data, session.balancer, session.seed
        if task.emulated:
            return Emulation(*shared, session.link(task.row))
        if task.engine == "threads":
            training = Training(*shared)
            given = training, session.devices
            return MeasuredSteps(training.row, partial(time_step, *given), partial(watch, *given))
        torch.manual_seed(session.seed)
        row = session.balancer.balanced(task.row, task.row.sized.layers(), data)
        processes = self.processes.enter_context(contextlib.closing(Processes(row.devices)))
        processes.make(task.engine, partial(work_of, row, session.seed))
        if task.engine != "ranks":
            return MeasuredSteps(row, processes.step)
        return MeasuredSteps(row, processes.step, partial(watched, processes.record))

    def run_one(self, task: PlannedTask, made: Steps) -> None:
        """Run one step; raise `Error` if the row's losses differ from those of another engine."""
        made.run()
        if isinstance(made, MeasuredSteps):
            check_same(made.losses, self.losses[task.row.name], str(task))

    def is_worth_measuring(self, task: PlannedTask) -> bool:
        """Say whether to measure a row. If that would take too long, as its emulation shows, record this reason."""
        session = self.session
        step, steps = (
            self.emulated_seconds.get(task.row.name),
            session.scale.least_steps + session.scale.warmup,
        )
        if step is None or step * steps <= LARGEST_SHARE * self.group.limit:
            return True
        reason = f"not measured: a step would take about {duration(step)}; --steps K measures it nevertheless"
        session.put(task.row, **task.kind, status="not run", reason=reason)
        session.progress.finish(session.job(task))
        return False

    def run(self) -> Iterator[int]:
        """Run rounds, up to their number or the group's time limit. Before each further one, yield the number done."""
        session = self.session
        before = min((len(task.before.get("step_time", ())) for task in self.running), default=0)
        rounds = max(1, (session.steps or session.scale.steps) - before)
        session.progress.begin(session.job(self.group.name))
        session.load.begin()
        started, steps = (
            time.monotonic(),
            {task: partial(self.step, task, rounds) for task in self.running},
        )
        try:
            for done, _ in enumerate(
                turns(steps, MOST_ROUNDS * rounds, random.Random(session.seed)), 1
            ):
                good = self.judge(min(rounds, session.scale.least_steps))
                session.rounds += 1
                self.put_all()
                late = time.monotonic() - started > self.group.limit
                if (
                    good >= rounds
                    or done == MOST_ROUNDS * rounds
                    or (late and done >= session.scale.least_steps)
                ):
                    break
                yield done
        finally:
            self.judge(rounds)
            self.put_all()
            session.progress.stop()

    def judge(self, least: int) -> int:
        """Read what others had in the round; return the number of undisturbed rounds, and keep only these if enough."""
        self.session.tell_others()
        shares = self.session.load.round()
        self.shares[self.session.rounds] = {}
        self.shares = {
            number: known or shares for number, known in self.shares.items()
        }  # the first may be too short
        good = {number: shares for number, shares in self.shares.items() if not too_busy(shares)}
        if len(self.shares) > len(good) >= least:
            for task, made in self.running.items():
                for i in [i for i, number in enumerate(self.rounds[task]) if number not in good][
                    ::-1
                ]:
                    del made.runs[i], self.rounds[task][i]
            self.left_out += len(self.shares) - len(good)
            self.shares = good
        return len(good)

    def step(self, task: PlannedTask, rounds: int) -> None:
        """Run one step of a row. A row that fails is not run again."""
        if task not in self.running:
            return
        number = len(self.rounds[task]) + 1
        which = f"round {number} of {rounds}" if number <= rounds else "a disturbed round again"
        self.session.start(f"{task}, {which}", self.session.job(task))
        try:
            self.run_one(task, self.running[task])
        except Exception as error:
            del self.running[task]
            self.fail(task, explain(error))
        else:
            self.rounds[task].append(self.session.rounds)

    def watch(self) -> None:
        """Record utilization and bubble of each row, and give timelines to the session's `trace`."""
        for task, steps in self.running.items():
            self.session.start(f"{task}, utilization", self.session.job(task))
            values, timeline = steps.watch()
            self.session.add_values(task.row, values, **task.kind)
            if timeline is not None and self.session.trace is not None:
                how = (
                    "emulated" if task.emulated else "" if task.engine == "threads" else task.engine
                )
                self.session.trace(
                    self.session.experiment.name, f"{task.row.name} {how}".rstrip(), timeline
                )
        self.session.progress.stop()

    def fail(self, task: PlannedTask, failure: Failure) -> None:
        """Record a row's failure. If it ran out of memory, remember it: it may fit alone."""
        reason = failure.reason
        if failure.status == "out of memory":
            self.out_of_memory.append(task)
            if task.emulated:
                with contextlib.suppress(Exception):  # without the count, it is still out of memory
                    reason = f"out of memory: {memory_needed(task.row)}"
        self.session.put(task.row, **task.kind, status=failure.status, reason=reason)
        self.session.progress.finish(self.session.job(task))

    def put_all(self) -> None:
        """Record the steps so far, without the losses if one is NaN or infinite: JSON has no such numbers."""
        for task, made in self.running.items():
            if made.runs:
                samples = made.samples()
                if self.paired:
                    samples["round"] = list(self.rounds[task])
                shares = [self.shares[number] for number in self.rounds[task]]
                samples |= {
                    x: [each[x] for each in shares]
                    for x in shares[0]
                    if all(x in each for each in shares)
                }
                if task.before:
                    samples = {
                        x: [*task.before[x], *each]
                        for x, each in samples.items()
                        if x in task.before
                    }
                if not all(map(math.isfinite, samples.get("loss", ()))):
                    del samples["loss"]
                config = made.config if isinstance(made, Emulation) else made.row.config()
                values = {"disturbed_rounds": self.left_out} if self.left_out else {}
                how = {**task.kind, "config": config, "samples": samples, "values": values}
                self.session.recorder.put(self.session.result(task.row, **how))
        self.session.recorder.save()
