"""Emulation: every task is run by the library, and a step takes what its schedule makes of their times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from reproduce.experiments import COMPONENTS, EXPERIMENTS, PLANNED, Row
from reproduce.machine.devices import Devices
from reproduce.run.emulation import MOST_EXECUTED, Emulation, Executed, executed, memory_needed
from reproduce.run.training import Balancer, FakeData, Training, record_tasks
from torchgpipe.plan import plan
from torchgpipe.plan.replay import Costs, Timeline, replay
from torchgpipe.tensors.observe import Kind, Task
from torchgpipe.timeline.stopwatch import Timed

CPU = Devices("cpu", 2, threads=1)
PLAIN = replace(
    EXPERIMENTS["unet-speed"].scale("small").rows[0],
    size=(1, 2), input_shape=(3, 64, 64), batch_size=4, partitions=None, chunks=None, checkpoint=None, balance=None,
)  # fmt: skip
BALANCES = {1: (65,), 2: (30, 35), 3: (20, 20, 25), 4: (16, 16, 16, 17)}
KINDS: tuple[Kind, ...] = ("forward", "recompute", "backward")
UPDATES = (0.25, 8.0, 0.5, 2.0)
LOSS = 0.125


def pipeline(n: int = 2, m: int = 4, checkpoint: Any = "except_last", **changes: Any) -> Row:
    return replace(PLAIN, partitions=n, chunks=m, checkpoint=checkpoint, balance=BALANCES[n], **changes)


def emulation(row: Row, devices: Devices = CPU, link: Any = None) -> Emulation:
    return Emulation(row, devices, FakeData([executed(row)], 0), Balancer(devices), 0, link)


def same(timeline: Timeline, expected: Timeline) -> bool:
    """Say whether two timelines agree, but for rounding."""
    ours, theirs = ([each[:3] for each in of.events] for of in (timeline, expected))
    times = [[x for each in of.events for x in each[3:]] + [of.seconds] for of in (timeline, expected)]
    return ours == theirs and times[0] == pytest.approx(times[1])


def cost(task: Task) -> float:
    """Give each task a time of its own; one that a batch of five samples splits last has half the samples."""
    return {"forward": 1.0, "recompute": 1.5, "backward": 2.0}[task.kind] * (1 + task.partition) + task.micro_batch / 64


@dataclass
class Made:
    """Hold a clock that only made-up times move, and what is true while tasks run."""

    now: float = 0.0
    threads: int = 0
    seen: tuple[Task, ...] = ()
    updates: Iterator[float] = field(default_factory=lambda: iter(UPDATES))


class FakeMark:
    made: ClassVar[Made]

    def __init__(self, device: torch.device) -> None:
        self.time = self.made.now

    def since(self, origin: FakeMark) -> float:
        return 3 * self.work_since(origin)  # other programs take the rest

    def work_since(self, origin: FakeMark) -> float:
        return self.time - origin.time


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    """Run the real tasks, but have them take made-up times; the gradients stay."""
    made = Made()
    device = torch.device("cpu")

    def watch(training: Training, run: Callable[[], object]) -> SimpleNamespace:
        made.updates = iter(UPDATES)
        made.seen = tuple(each.task for each in record_tasks(training, run).tasks)
        made.threads = torch.get_num_threads()
        watched, phase = [], "forward"
        for task in made.seen:
            if phase == "forward" != task.kind:
                phase, made.now = "backward", made.now + LOSS
            start = FakeMark(device)
            made.now += cost(task)
            watched.append(Timed(task, start, FakeMark(device)))  # type: ignore[arg-type]
        return SimpleNamespace(tasks=watched)

    def update(optimizer: torch.optim.Optimizer) -> None:
        made.now += next(made.updates)

    monkeypatch.setattr("reproduce.run.emulation.record_tasks", watch)
    monkeypatch.setattr("reproduce.run.emulation.update", update)
    monkeypatch.setattr("reproduce.run.emulation.Mark", FakeMark)
    monkeypatch.setattr(FakeMark, "made", made, raising=False)
    return made


def costs(row: Row, **changes: Any) -> Costs:
    """Write down what the tasks of a row take: of those that are not run, what equal ones do."""
    n, m, ran = row.devices, row.micro_batches or 1, executed(row).micro_batches or 1
    again = {"always": m, "except_last": m - 1}.get(row.checkpoint or "", 0)

    def table(kind: Any, count: int = m) -> list[list[float]]:
        like = [i if ran == m else ran - 1 if i == m - 1 else i % (ran - 1) for i in range(m)]
        return [[cost(Task(kind, like[i], j)) if i < count else 0.0 for j in range(n)] for i in range(m)]

    whole = {"forward": table("forward"), "backward": table("backward"), "recompute": table("recompute", again)}
    return Costs(**{**whole, "loss": LOSS * row.batch_size / executed(row).batch_size, **changes})


class FakeLink:
    """Copies take half a second, and so does a skip from the first partition to the last."""

    def copies(self, row: Row, forward: float) -> tuple[list[float], dict[tuple[int, int], float]]:
        n = row.devices
        assert forward == pytest.approx(sum(range(1, n + 1))), "what the first micro-batch takes in all partitions"
        return [0.5] * (n - 1), {(0, n - 1): 0.5}


LINKED = {"copy": [0.5, 0.5], "skips": {(0, 2): 0.5}}
COMPONENTS_OF: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    (COMPONENTS, {}),
    (("streams", "portals"), {"ahead": False}),  # nothing asks for a recomputation before its gradient is there
    (("dependency", "portals"), {"blocking": True}),
    ((), {"ahead": False, "blocking": True}),
]


@pytest.mark.parametrize(
    ("row", "changes", "linked"),
    [
        *((pipeline(n, checkpoint=mode), {}, False) for n in BALANCES for mode in ("always", "except_last", "never")),
        *((pipeline(3, components=own), changes, on) for own, changes in COMPONENTS_OF for on in (False, True)),
        (pipeline(m=16, batch_size=31), {}, False),  # the last is of one sample instead of two; few are run
    ],
)
def test_a_step_takes_what_the_schedule_makes_of_all_its_tasks(
    made: Made, row: Row, changes: dict[str, Any], linked: bool
) -> None:
    emulated, n, m = emulation(row, link=FakeLink() if linked else None), row.devices, MOST_EXECUTED
    run = emulated.run()
    again = {"always": m, "except_last": m - 1, "never": 0}[row.checkpoint or ""]
    counts = Counter((task.kind, task.partition) for task in made.seen)
    for j in range(n):
        assert [counts[kind, j] for kind in KINDS] == [m, again, m]
    assert len(set(made.seen)) == len(made.seen) == n * (2 * m + again)
    assert run.work == made.now == sum(map(cost, made.seen)) + LOSS + sum(UPDATES[:n])
    assert run.wall == 3 * run.work
    found, here = emulated.step(), replay(costs(row, **changes))
    timeline = replay(costs(row, **changes, **LINKED)) if linked else here
    assert same(found.timeline, timeline) and (found.seconds > found.here) == linked
    updated = max(UPDATES[:n])  # partitions are updated at the same time
    assert (found.seconds, found.here) == pytest.approx([each.seconds + updated for each in (timeline, here)])
    assert (emulated.row.batch_size, emulated.row.micro_batches) == (row.batch_size, row.micro_batches)


# Two partitions, the second of which takes twice as long; the longer update is of 8 seconds.
LONE = pipeline(m=1, checkpoint="always")


@pytest.mark.parametrize(
    ("row", "link", "seconds"),
    [
        (PLAIN, None, 1 + LOSS + 2 + UPDATES[0]),  # forward and backward of the whole are one task each
        (pipeline(m=1, checkpoint="never"), None, 1 + 2 + LOSS + 4 + 2 + 8),
        (pipeline(m=2, checkpoint="never"), None, 1 + 2 + 2 + LOSS + 4 + 4 + 2 + 8 + 2 / 64),  # the second is longer
        (LONE, None, 1 + 2 + LOSS + 3 + 4 + 1.5 + 2 + 8),  # what cannot overlap runs in one thread on a CPU
        (LONE, FakeLink(), 1 + 2 + LOSS + 3 + 4 + 2 + 8 + 2 * 0.5),  # a skip beside a copy takes no time
    ],
)
def test_by_hand(made: Made, row: Row, link: Any, seconds: float) -> None:
    emulated = emulation(row, link=link)
    emulated.run()
    assert emulated.step().seconds == pytest.approx(seconds)


def test_a_task_takes_its_share_in_the_median_run() -> None:
    """One that was disturbed decides nothing; a slow machine slows down all alike."""
    emulated = emulation(pipeline(m=1, checkpoint="never"))
    tasks = {Task(kind, 0, j): 1.0 + j for kind in KINDS if kind != "recompute" for j in range(2)}

    def run(slow: float = 1.0, disturbed: float = 0.0) -> Executed:
        taken = {task: slow * seconds for task, seconds in tasks.items()}
        taken[Task("forward", 0, 1)] += disturbed
        return Executed(taken, slow * 0.5, [slow, slow * 0.5], work=slow * 8 + disturbed, wall=9.0, value=slow)

    emulated.runs = [run()]
    assert emulated.step().seconds == 1 + 2 + 0.5 + 2 + 1 + 1
    for disturbed in (0.0, 5.0):
        emulated.runs = runs = [run(), run(slow=2), run(disturbed=disturbed), run(), run(slow=0.5)]
        found = emulated.step()
        assert (found.work, found.seconds, found.here) == (8, 7.5, 7.5)
        samples = emulated.samples()
        assert samples["step_time"] == [7.5, 15, 7.5 + disturbed * 7.5 / 8, 7.5, 3.75], "as slow as all work was"
        assert samples["work_time"] == [each.work for each in runs] and samples["wall_time"] == [9.0] * 5
        assert samples["loss"] == [1, 2, 1, 1, 0.5] and samples["here_time"] == samples["step_time"]


@pytest.mark.parametrize(
    ("batch_size", "chunks", "ran"),
    [
        (64, 32, (8, 4)),
        (62, 16, (14, 4)),  # the last is of two samples instead of four
        (12, 4, (12, 4)),
        (8, 2, (8, 2)),
        (5, 4, (5, 4)),  # three micro-batches: 2, 2, 1
        (25000, 1667, (85, 6)),  # 15 samples each but 10: four parts of 55 samples would be smaller, six of 85 are not
        (5, None, (5, None)),
    ],
)
def test_equal_micro_batches_are_not_all_run(batch_size: int, chunks: int | None, ran: tuple[int, int | None]) -> None:
    row = replace(PLAIN, partitions=chunks and 2, chunks=chunks, batch_size=batch_size)
    found = executed(row)
    assert (found.batch_size, found.chunks) == ran
    assert found.micro_batch_size == row.micro_batch_size
    if chunks is not None:
        sizes = [[len(part) for part in torch.empty(each.batch_size).chunk(each.chunks or 1)] for each in (row, found)]
        assert (sizes[0][0], sizes[0][-1]) == (sizes[1][0], sizes[1][-1])


@pytest.mark.parametrize("row", [PLAIN, pipeline(1, m=2), pipeline(4, m=2)])
def test_loss_and_gradients_are_those_of_the_plain_model_on_the_same_micro_batches(made: Made, row: Row) -> None:
    emulated, data, cpu = emulation(row), FakeData([row], 0), torch.device("cpu")
    torch.manual_seed(0)
    model = row.build()
    for layer in (*emulated.training.model.modules(), *model.modules()):
        if isinstance(layer, (nn.Dropout, nn.Dropout2d)):
            layer.p = 0.0  # whose random numbers would depend on the order of the tasks
    value = emulated.run().value
    output = torch.cat([model(part) for part in data.input(row, cpu).chunk(row.chunks or 1)])
    loss = nn.functional.binary_cross_entropy_with_logits(output, data.target(row, cpu))
    loss.backward()
    assert value == pytest.approx(loss.item(), rel=1e-6)
    ours = [parameter.grad for partition in emulated.training.partitions for parameter in partition.parameters()]
    torch.testing.assert_close(ours, [parameter.grad for parameter in model.parameters()])


def test_a_step_trains() -> None:
    emulated = emulation(pipeline())
    before = [parameter.detach().clone() for parameter in emulated.training.model.parameters()]
    run = emulated.run()
    for old, parameter in zip(before, emulated.training.model.parameters(), strict=True):
        assert parameter.grad is None and not torch.equal(old, parameter)
    found = emulated.step()
    assert 0 < found.timeline.seconds < found.seconds < found.work < 1.5 * run.wall


def test_a_partition_without_parameters_has_nothing_to_update(made: Made) -> None:
    layers = list(PLAIN.build())
    bare = next(i for i, layer in enumerate(layers) if not any(True for _ in layer.parameters()))
    row = replace(pipeline(3), balance=(bare, 1, len(layers) - bare - 1))
    emulated = emulation(row)
    emulated.run()
    assert emulated.step().seconds == pytest.approx(replay(costs(row)).seconds + max(UPDATES[:2]))


@pytest.mark.parametrize("n", [None, 2, 4])
def test_what_does_not_fit_says_what_it_needs(n: int | None) -> None:
    row = replace(PLAIN if n is None else pipeline(n, m=8), batch_size=1 << 16)
    needed = memory_needed(row)
    start, _, gib = needed.removesuffix(" GiB on the one device that plays all").partition(" take ")
    assert start == f"its {n or 1} partition(s)" and int(gib) > 1
    assert memory_needed(replace(row, balance=None)).startswith(start), "also where the balance is not known yet"


@pytest.mark.parametrize("before", [1, 2])
def test_one_thread_plays_every_device(made: Made, before: int) -> None:
    """The CPU time of further threads would not be counted."""
    with Devices("cpu", 1, threads=before).in_use():
        emulation(pipeline(), Devices("cpu", 1, threads=before)).run()
        assert (made.threads, torch.get_num_threads()) == (1, before)


@pytest.mark.parametrize(
    ("devices", "expected"), [(Devices("cuda", 1), "cuda:0"), (Devices("cuda", 2), "cuda:0"), (CPU, "cpu")]
)
def test_all_partitions_are_on_the_first_device_and_one_thread_issues_their_tasks(
    devices: Devices, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_devices(*asked: Any) -> None:
        assert asked[2:] == ([torch.device(expected)] * 4, "graph")
        raise InterruptedError

    monkeypatch.setattr("reproduce.run.training.on_devices", on_devices)
    with pytest.raises(InterruptedError):
        emulation(pipeline(4), devices)


def test_a_planned_balance_is_of_the_whole_row_and_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Mock(side_effect=plan)
    monkeypatch.setattr("reproduce.run.training.plan", spy)
    row = pipeline(2, 8, "always", configuration=PLANNED, equal="model", batch_size=8)
    balancer, data = Balancer(CPU), FakeData([row], 0)
    for n in (2, 4):
        emulation = Emulation(replace(row, balance=None, partitions=n), CPU, data, balancer, 0)
        assert executed(row).chunks == 4 and emulation.training.row.chunks == 4
        balance = emulation.row.balance or ()
        assert len(balance) == n and sum(balance) == 65 and balance == emulation.training.row.balance
    spy.assert_called_once()
    assert {"batch_size": 8, "chunks": 8, "checkpoint": "always"}.items() <= spy.call_args.kwargs.items()
