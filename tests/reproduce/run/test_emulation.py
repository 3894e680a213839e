"""Emulation: the library runs every task, and a step is the replay of the schedule with their times and copies."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from reproduce.experiments import EXPERIMENTS
from reproduce.experiments.row import COMPONENTS, Row
from reproduce.machine.devices import Devices
from reproduce.run.emulation import Emulation, Executed, Link, own_links, shortened
from reproduce.run.training import Balancer, FakeData
from torchgpipe.plan.hardware.hardware import hardware_names, load_hardware
from torchgpipe.plan.replay import Costs, replay
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
BARE = next(i for i, layer in enumerate(PLAIN.sized.layers()) if not [*layer.parameters()])


def pipeline(n: int = 2, m: int = 4, checkpoint: Any = "except_last", **changes: Any) -> Row:
    row = replace(PLAIN, partitions=n, chunks=m, checkpoint=checkpoint, balance=BALANCES[n])
    return replace(row, **changes)


def emulation(row: Row, devices: Devices = CPU, link: Any = None) -> Emulation:
    return Emulation(row, devices, FakeData([shortened(row)], 0), Balancer(devices), 0, link)


def recomputed(row: Row, m: int) -> int:
    """Count the micro-batches that are recomputed."""
    return {"always": m, "except_last": m - 1}.get(row.checkpoint or "", 0)


class Clocks:
    """Clocks with growing intervals between marks. Wall time is three times CPU time."""

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
        *((pipeline(3, checkpoint=mode), 3) for mode in ("always", "except_last", "never")),
        (pipeline(3, balance=(BARE, 1, 65 - BARE - 1)), 2),
    ],  # without parameters there is nothing to update
)
def test_every_task_is_run_once_and_timed(
    row: Row, updated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulated = emulation(row)
    monkeypatch.setattr("torchgpipe.timeline.stopwatch.time", Clocks())
    with Devices("cpu", 1, threads=2).in_use():
        run = emulated.run()
        assert torch.get_num_threads() == 2
    m = row.chunks or 1
    counts = Counter((task.kind, task.partition) for task in run.tasks)
    for j in range(row.devices):
        assert [counts[kind, j] for kind in KINDS] == [m, recomputed(row, m), m]
    # Marks: one when the step starts, one per partition, two per task, one before and after each update.
    taken = [float(end**2 - start**2) for start, end in pairwise(range(1, 1000))]
    first, last = 1 + row.devices, 1 + row.devices + 2 * len(run.tasks)
    assert list(run.tasks.values()) == taken[first:last:2]
    assert run.loss == taken[first - 1 + 2 * m * row.devices], (
        "from the last forward to the first backward"
    )
    assert run.updates == taken[last : last + updated]
    assert run.work == sum(taken[: last + updated]) and emulated.runs == [run]


def cost(task: Task) -> float:
    """Return a different time for each task."""
    return {"forward": 1.0, "recompute": 1.5, "backward": 2.0}[task.kind] * (
        1 + task.partition
    ) + task.micro_batch / 64


def costs(row: Row, like: Sequence[int], **changes: Any) -> Costs:
    """Return the costs of a row. Micro-batch k takes as long as micro-batch `like[k]`."""

    def table(kind: Kind, count: int) -> list[list[float]]:
        return [
            [cost(Task(kind, i, j)) * (k < count) for j in range(row.devices)]
            for k, i in enumerate(like)
        ]

    m = len(like)
    recompute = table("recompute", recomputed(row, m))
    return replace(
        Costs(table("forward", m), table("backward", m), recompute, loss=LOSS), **changes
    )


def ran(row: Row) -> Executed:
    """Make up the times of the tasks that are run for a row."""
    m = shortened(row).micro_batches or 1
    counts: dict[Kind, int] = {"forward": m, "recompute": recomputed(row, m), "backward": m}
    tasks = [
        Task(kind, i, j)
        for kind, count in counts.items()
        for i in range(count)
        for j in range(row.devices)
    ]
    return Executed(
        {task: cost(task) for task in tasks}, LOSS, UPDATES[: row.devices], work=9.0, value=1.0
    )


LONE = pipeline(3, m=1, checkpoint="always")


@pytest.mark.parametrize(
    ("row", "like", "changes", "linked"),
    [
        (PLAIN, range(1), {}, False),
        *(
            (pipeline(3, checkpoint=mode), range(4), {}, False)
            for mode in ("always", "except_last", "never")
        ),
        (pipeline(3), range(4), {}, True),
        (
            pipeline(3, m=16, batch_size=31),
            [0, 1, 2] * 5 + [3],
            {"loss": LOSS * 31 / 7},
            False,
        ),  # only 4 of 16 are run
        (LONE, range(1), {"ahead": False}, False),  # without overlap, a CPU uses one thread
        (LONE, range(1), {}, True),
        # Without the dependency, a recomputation starts only when its gradient has arrived.
        (pipeline(3, components=("streams", "portals")), range(4), {"ahead": False}, False),
        (pipeline(3, components=("portals",)), range(4), {"ahead": False, "blocking": True}, True),
    ],
)
def test_a_step_is_its_tasks_replayed(
    row: Row, like: Sequence[int], changes: dict[str, Any], linked: bool
) -> None:
    link = Link(HARDWARE, {"": row}) if linked else None
    emulated = emulation(row, link=link)
    if link is not None:
        # The forward of the first micro-batch in all partitions.
        changes = (
            dict(zip(("copy", "skips"), link.copies(row, 1.0 + 2.0 + 3.0), strict=True)) | changes
        )
    emulated.runs = [ran(row)]
    found, timeline = emulated.step(), replay(costs(row, like, **changes))
    assert [each[:3] for each in found.timeline.events] == [each[:3] for each in timeline.events]
    assert [each.end for each in found.timeline.events] == pytest.approx(
        [each.end for each in timeline.events]
    )
    updated = max(UPDATES[: row.devices])  # partitions are updated at the same time
    assert found.seconds == pytest.approx(timeline.seconds + updated)
    emulated.link = None
    assert found.here == emulated.step().seconds and (found.seconds != found.here) == linked
    assert (emulated.row.batch_size, emulated.row.micro_batches) == (
        row.batch_size,
        row.micro_batches,
    )


def test_a_task_takes_its_share_in_the_median_run() -> None:
    """A disturbed run does not matter; on a slow machine all tasks are slower alike."""
    emulated = emulation(pipeline(m=1, checkpoint="never"))
    tasks = {Task(kind, 0, j): 1.0 + j for kind in KINDS if kind != "recompute" for j in range(2)}

    def run(slow: float = 1.0, disturbed: float = 0.0) -> Executed:
        taken = {task: slow * seconds for task, seconds in tasks.items()}
        taken[Task("forward", 0, 1)] += disturbed
        return Executed(
            taken, slow * 0.5, [slow, slow * 0.5], work=slow * 8 + disturbed, value=slow
        )

    emulated.runs = runs = [run(), run(slow=2), run(disturbed=5.0), run(), run(slow=0.5)]
    found, samples = emulated.step(), emulated.samples()
    assert (found.work, found.seconds, found.here) == (8, 1 + 2 + 0.5 + 2 + 1 + 1, 7.5)
    assert samples["step_time"] == [7.5, 15, 7.5 + 5.0 * 7.5 / 8, 7.5, 3.75], (
        "as slow as all work was"
    )
    assert samples["work_time"] == [each.work for each in runs]
    assert samples["loss"] == [1, 2, 1, 1, 0.5] and samples["here_time"] == samples["step_time"]


@pytest.mark.parametrize(
    ("batch_size", "chunks", "ran"),
    [
        (64, 32, (8, 4)),
        (62, 16, (14, 4)),  # the last is of two samples instead of four
        (12, 4, (12, 4)),
        (5, 4, (5, 4)),  # three micro-batches: 2, 2, 1
        (
            25000,
            1667,
            (85, 6),
        ),  # 15 samples each but 10: four parts of 55 samples would be smaller, six of 85 are not
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


def test_copies_take_what_the_hardware_says_or_the_same_share_of_a_forward_as_in_the_published_model() -> (
    None
):
    """The published row of the same name counts, else the first one, but not its balance: it was for other devices."""
    large, small = pipeline(4, batch_size=8, size=(1, 8)), pipeline(4)
    hardware, papers = (
        Link(HARDWARE, None),
        {"first": replace(large, batch_size=32), "pb": replace(large, balance=None)},
    )
    own, theirs = hardware.copies(large, 1.0)
    assert (
        len(own) == 3 and {(0, 3)} <= set(theirs) and hardware.copies(large, 2.0) == (own, theirs)
    )
    through, beside = hardware.copies(replace(large, components=COMPONENTS[:2]), 1.0)
    passing = [sum(s for (a, b), s in theirs.items() if a <= j < b) for j in range(3)]
    assert not beside and through == pytest.approx(
        [copy + more for copy, more in zip(own, passing, strict=True)]
    )

    link = Link(HARDWARE, papers)
    copies, skips = link.copies(replace(small, name="pb/x"), 3.0)
    forward = sum(link._predictor(large.sized).layers(2).forward)
    assert copies == pytest.approx([copy / forward * 3 for copy in own])
    assert skips == pytest.approx({route: skip / forward * 3 for route, skip in theirs.items()})
    first = link.copies(replace(small, name="first"), 3.0)
    assert link.copies(replace(small, name="none"), 3.0) == first != (copies, skips)


def test_gpus_have_the_links_of_a_shipped_node_and_one_thread_issues_tasks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All partitions are on the first device."""
    asked = Mock(side_effect=InterruptedError)
    monkeypatch.setattr("reproduce.run.training.on_devices", asked)
    with pytest.raises(InterruptedError):
        emulation(pipeline(4), Devices("cuda", 4))
    assert asked.call_args.args[2:] == ([torch.device("cuda", 0)] * 4, "graph")
    for gpu, expected in {
        "Tesla P40": "p40x8",
        "NVIDIA A100-SXM4-80GB": "a100x8",
        "NVIDIA A10": None,
    }.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, gpu=gpu: gpu)
        assert own_links(Devices("cuda", 1)) == expected and expected in (None, *hardware_names())
    assert own_links(CPU) is None
