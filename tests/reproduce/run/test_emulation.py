"""Tests of emulation, which predicts the time of a step on several devices by running on one.

All tasks run one after another on a single device, and are timed. Then a step on several devices is
simulated in the order of the schedule, with the times of tasks and copies.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from reproduce.experiments import EXPERIMENTS
from reproduce.experiments.row import Row
from reproduce.machine.devices import Devices
from reproduce.predict.link import Link
from reproduce.run.emulation import Emulation, Executed, shortened
from reproduce.run.training import Balancer, FakeData
from torchgpipe.plan.hardware.hardware import load_hardware
from torchgpipe.plan.predict.replay import Costs, replay
from torchgpipe.tensors.observe import Kind, Task

CPU = Devices("cpu", 2, threads=1)
PLAIN = replace(
    EXPERIMENTS["unet-speed"].scale("small").rows[0],
    size=(1, 2),
    input_shape=(3, 64, 64),
    batch_size=4,
    partitions=None,
    chunks=None,
    checkpoint=None,
    balance=None,
)
BALANCES = {1: (65,), 2: (30, 35), 3: (20, 20, 25), 4: (16, 16, 16, 17)}
KINDS: tuple[Kind, ...] = ("forward", "recompute", "backward")
UPDATES = (0.25, 8.0, 0.5, 2.0)
LOSS = 0.125
HARDWARE = replace(load_hardware("p40x8"), link_latency=0.0)
# The number of layers that come before the first layer without parameters.
BARE = 0
for layer in PLAIN.sized.layers():
    if not list(layer.parameters()):
        break
    BARE += 1


def pipeline(n: int = 2, m: int = 4, checkpoint: Any = "except_last", **changes: Any) -> Row:
    row = replace(PLAIN, partitions=n, chunks=m, checkpoint=checkpoint, balance=BALANCES[n])
    return replace(row, **changes)


def emulation(row: Row, devices: Devices = CPU, link: Any = None) -> Emulation:
    data = FakeData([shortened(row)], 0)
    return Emulation(row, devices, data, Balancer(devices), 0, link)


def recomputed(row: Row, m: int) -> int:
    """Return how many of `m` micro-batches are recomputed in a row's mode of checkpointing."""
    counts = {"always": m, "except_last": m - 1}
    return counts.get(row.checkpoint or "", 0)


class Clocks:
    """Fake clocks for wall time and CPU time. Wall time is three times the CPU time.

    The time between two readings grows with each reading, so that each task has its own time.
    """

    marks = 0

    def perf_counter(self) -> float:
        assert torch.get_num_threads() == 1, "the CPU time of further threads would not be counted"
        self.marks += 1
        return 3.0 * self.marks**2

    def thread_time(self) -> float:
        return float(self.marks**2)


@pytest.mark.parametrize(
    ("row", "updated"),
    [
        (PLAIN, 1),
        (pipeline(3, checkpoint="always"), 3),
        (pipeline(3, checkpoint="except_last"), 3),
        (pipeline(3, checkpoint="never"), 3),
        # A partition without parameters has nothing to update.
        (pipeline(3, balance=(BARE, 1, 65 - BARE - 1)), 2),
    ],
)
def test_every_task_is_run_once_and_timed(
    row: Row, updated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulated = emulation(row)
    monkeypatch.setattr("torchgpipe.timeline.stopwatch.time", Clocks())
    with Devices("cpu", 1, threads=2).in_use():
        run = emulated.run()
        assert torch.get_num_threads() == 2
    m = shortened(row).micro_batches or 1
    counts = Counter((task.kind, task.partition) for task in run.tasks)
    for j in range(row.devices):
        assert [counts[kind, j] for kind in KINDS] == [m, recomputed(row, m), m]
    # Marks: one at the start of the step, one per partition, two per task, and two per update.
    taken = [float(end**2 - start**2) for start, end in pairwise(range(1, 1000))]
    first = 1 + row.devices
    first_backward = first + 2 * m * row.devices
    last = first + 2 * len(run.tasks)
    assert list(run.tasks.values()) == taken[first:last:2]
    assert run.loss == taken[first_backward - 1], "from the last forward to the first backward"
    assert run.updates == taken[last : last + updated]
    assert run.work == sum(taken[: last + updated])
    assert emulated.runs == [run]


SECONDS = {"forward": 1.0, "recompute": 1.5, "backward": 2.0}


def cost(task: Task) -> float:
    """Return a made-up time for a task, in seconds. It differs from task to task."""
    of_partition = SECONDS[task.kind] * (1 + task.partition)
    return of_partition + task.micro_batch / 64


def costs(row: Row, like: Sequence[int], **changes: Any) -> Costs:
    """Return made-up times of all tasks of a step.

    Args:
        row: The configuration.
        like: For each micro-batch of the step, the index of the emulated micro-batch whose times it
            gets.
        changes: New values for fields of the returned `Costs`.
    """

    def table(kind: Kind, count: int) -> list[list[float]]:
        """Return the seconds of a kind of task: a list per micro-batch, a number per partition.

        Only the first `count` micro-batches have such tasks. Other micro-batches have only zeros.
        """
        costs = []
        for k, i in enumerate(like):
            if k < count:
                costs.append([cost(Task(kind, i, j)) for j in range(row.devices)])
            else:
                costs.append([0.0] * row.devices)
        return costs

    m = len(like)
    changes.setdefault("loss", LOSS * m / len(set(like)))
    forward, backward = table("forward", m), table("backward", m)
    recompute = table("recompute", recomputed(row, m))
    return replace(Costs(forward, backward, recompute, loss=0.0), **changes)


def ran(row: Row) -> Executed:
    """Return made-up times for the tasks that an emulation runs (not those of a whole step)."""
    m = shortened(row).micro_batches or 1
    counts: dict[Kind, int] = {"forward": m, "recompute": recomputed(row, m), "backward": m}
    times = {}
    for kind, count in counts.items():
        for i, j in product(range(count), range(row.devices)):
            task = Task(kind, i, j)
            times[task] = cost(task)
    return Executed(times, LOSS, UPDATES[: row.devices], work=9.0, value=1.0)


FIRST_AND_LAST = [0, 0, 0, 1]  # of four micro-batches, only two are run
LONE = pipeline(3, m=1, checkpoint="always")
WITHOUT_DEPENDENCY = pipeline(3, components=("streams", "portals"))
ONLY_PORTALS = pipeline(3, components=("portals",))


@pytest.mark.parametrize(
    ("row", "like", "changes", "linked"),
    [
        (PLAIN, range(1), {}, False),
        (pipeline(3, checkpoint="always"), FIRST_AND_LAST, {}, False),
        (pipeline(3, checkpoint="except_last"), FIRST_AND_LAST, {}, False),
        (pipeline(3, checkpoint="never"), FIRST_AND_LAST, {}, False),
        (pipeline(3), FIRST_AND_LAST, {}, True),
        (pipeline(3, m=16, batch_size=31), [0] * 15 + [1], {"loss": LOSS * 31 / 3}, False),
        (pipeline(3, m=2, batch_size=2), range(2), {"loss": LOSS}, False),
        (LONE, range(1), {"ahead": False}, False),  # without overlap, a CPU uses one thread
        (LONE, range(1), {}, True),
        # Without the dependency, a recomputation starts only when its gradient has arrived.
        (WITHOUT_DEPENDENCY, FIRST_AND_LAST, {"ahead": False}, False),
        (ONLY_PORTALS, FIRST_AND_LAST, {"ahead": False, "blocking": True}, True),
    ],
)
def test_a_step_is_its_tasks_replayed(
    row: Row, like: Sequence[int], changes: dict[str, Any], linked: bool
) -> None:
    link = Link(HARDWARE, {"": row}) if linked else None
    emulated = emulation(row, link=link)
    emulated.runs = [ran(row)]
    if link is not None:
        forward = 1.0 + 2.0 + 3.0  # of the first micro-batch in all partitions
        copy, skips = link.copies(row, forward)
        changes = {"copy": copy, "skips": skips, **changes}
    timeline = replay(costs(row, like, **changes))

    found = emulated.step()
    emulated.link = None
    without_link = emulated.step()

    for ours, expected in zip(found.timeline.events, timeline.events, strict=True):
        assert ours[:3] == expected[:3]
        assert ours.end == pytest.approx(expected.end)
    updated = max(UPDATES[: row.devices])  # partitions are updated at the same time
    assert found.seconds == pytest.approx(timeline.seconds + updated)
    assert found.here == without_link.seconds
    assert (found.seconds != found.here) == linked
    assert emulated.row.batch_size == row.batch_size
    assert emulated.row.micro_batches == row.micro_batches


def test_a_task_takes_its_share_in_the_median_run() -> None:
    """Check that an emulated task takes its median share of a step, times a step's median time.

    So a step in which one task was disturbed does not change the medians. A step in which the whole
    machine was slow does not change them either: all its tasks take their usual shares of the step.
    """
    emulated = emulation(pipeline(m=1, checkpoint="never"))
    first, second = 1.0, 2.0  # seconds of a task on each partition
    loss, update = 0.5, 1.0
    work = 8.0  # of the four tasks, the loss and two updates
    step = first + second + loss + second + first + update

    def run(slow: float = 1.0, disturbed: float = 0.0) -> Executed:
        tasks = {
            Task("forward", 0, 0): slow * first,
            Task("forward", 0, 1): slow * second + disturbed,
            Task("backward", 0, 0): slow * first,
            Task("backward", 0, 1): slow * second,
        }
        updates = [slow * update, slow * 0.5]
        return Executed(tasks, slow * loss, updates, work=slow * work + disturbed, value=slow)

    runs = [run(), run(slow=2), run(disturbed=5.0), run(), run(slow=0.5)]
    emulated.runs = runs

    found, samples = emulated.step(), emulated.samples()

    assert found.work == work
    assert found.seconds == step
    assert found.here == step
    as_slow_as_all_work = [7.5, 15, 7.5 + 5.0 * 7.5 / 8, 7.5, 3.75]
    assert samples["step_time"] == as_slow_as_all_work
    assert samples["work_time"] == [each.work for each in runs]
    assert samples["loss"] == [1, 2, 1, 1, 0.5]
    assert samples["here_time"] == samples["step_time"]


def test_the_host_issues_each_task_while_the_device_is_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    emulated = emulation(pipeline(3, checkpoint="always"))
    clocks = Clocks()
    waits: list[int] = []
    monkeypatch.setattr(Devices, "synchronize", lambda devices: waits.append(clocks.marks))
    monkeypatch.setattr("torchgpipe.timeline.stopwatch.time", clocks)
    # No pause may fall into a simulated task. No layer is long enough for a pause, and the pauses
    # before tasks get a time that is before the step.
    monkeypatch.setattr("reproduce.machine.issuing.LEAST_SECONDS", math.inf)
    monkeypatch.setattr("reproduce.machine.issuing.time", SimpleNamespace(perf_counter=lambda: 0.0))
    with Devices("cpu", 1, threads=1).in_use():
        seconds = emulated._issue_seconds()
    # Marks: one per partition, and two per task.
    starts = range(1 + 3, clocks.marks, 2)
    assert list(seconds.values()) == [3.0 * ((k + 1) ** 2 - k**2) for k in starts]
    assert waits == [k - 1 for k in starts]
    assert len(seconds) == 2 * 3 * len(KINDS)
    for parameter in emulated.training.model.parameters():
        assert parameter.grad is None


def test_a_step_is_replayed_as_if_one_thread_issued_all_tasks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check a simulated step on GPUs, whose tasks are all issued (submitted) by one host thread.

    The emulation measures in three steps how long it takes to issue each task, and uses the median.
    """
    row = pipeline(3)
    emulated = emulation(row)
    emulated.runs = [ran(row)]
    slower = iter([0.1, 2.0, 9.0])

    def issue_seconds() -> dict[Task, float]:
        share = next(slower)
        return {task: share * cost(task) for task in ran(row).tasks}

    monkeypatch.setattr(emulated, "_issue_seconds", issue_seconds)
    usual, _ = emulated.watch()
    emulated.devices = Devices("cuda", 1)

    values, _ = emulated.watch()

    made = costs(row, FIRST_AND_LAST)
    doubled: dict[Kind, list[list[float]]] = {}
    for kind in KINDS:
        table = getattr(made, kind)
        doubled[kind] = (2.0 * torch.tensor(table, dtype=torch.float64)).tolist()
        # The record has the micro-batches that were run: the first and the last one.
        first, last = values["task_time"][kind]
        assert first == pytest.approx(table[0])
        assert last == pytest.approx(table[-1])
        assert values["issue_time"][kind] == [doubled[kind][0], doubled[kind][-1]]
    replayed = replay(replace(made, issue=doubled)).seconds
    assert values["one_thread_time"] == pytest.approx(replayed + max(UPDATES[:3]))
    assert values["one_thread_time"] > emulated.step().seconds
    assert usual == {name: values[name] for name in ("executed", "utilization", "bubble")}


@pytest.mark.parametrize(
    ("batch_size", "chunks", "ran"),
    [
        (64, 32, (4, 2)),
        (62, 16, (10, 3)),  # the last micro-batch has two samples, the others have four
        (6, 2, (6, 2)),
        (5, 4, (3, 2)),
        # The next row has micro-batches of 15 samples, but the last one has 10. To emulate it, two
        # micro-batches (15 + 10 = 25 samples) are not enough, because 25 samples in 2 chunks make
        # micro-batches of 13 and 12. But 85 samples in 6 chunks make micro-batches of 15 and a last
        # one of 10.
        (25000, 1667, (85, 6)),
        (5, None, (5, None)),
    ],
)
def test_equal_micro_batches_are_not_all_run(
    batch_size: int, chunks: int | None, ran: tuple[int, int | None]
) -> None:
    row = replace(PLAIN, partitions=chunks and 2, chunks=chunks, batch_size=batch_size)
    found = shortened(row)
    assert (found.batch_size, found.chunks) == ran
    assert found.micro_batch_size == row.micro_batch_size


def test_one_gpu_plays_all_devices_and_one_thread_issues_tasks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that emulation on GPUs uses only the first GPU, and one thread (the engine "graph")."""
    asked = Mock(side_effect=InterruptedError)
    monkeypatch.setattr("reproduce.run.training.on_devices", asked)
    with pytest.raises(InterruptedError):
        emulation(pipeline(4), Devices("cuda", 4))
    first = torch.device("cuda", 0)
    assert asked.call_args.args[2:] == ([first] * 4, "graph")
