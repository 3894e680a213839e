"""Test how ranks notice that another rank is missing, idle or hanging.

In these tests, simulated clocks say how long a rank is idle. Real processes are tested in
tests/failures.
"""

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from torchgpipe.distributed import RankFailed, connections, waiting
from torchgpipe.distributed.liveness import idle
from torchgpipe.distributed.liveness.idle import Idle, cpu_time_of_descendants, place
from torchgpipe.distributed.liveness.monitor import Activity, Label, RankMonitor

from ...parts import Fails
from ...start import python
from ..ledger import assert_eventually

PATIENCE = 120  # seconds; a test takes as long only if it hangs
BURN = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()\n"
RUNS_BURN = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BURN!r}])"
GRANDCHILD = [sys.executable, "-c", RUNS_BURN]


def test_who_does_not_come_or_came_twice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=0.2))
    monkeypatch.setattr(waiting, "NOTICE", 0.1)
    monkeypatch.setattr(connections, "_get_default_store", lambda: store)
    with pytest.raises(RuntimeError, match=r"has waited for 0.2 s .* no sign of rank 1, 2;"):
        connections.Connections([0, 1, 2], 0, None)
    assert capsys.readouterr().err.startswith("rank 0 has waited for 0.1 s for others to make")
    c10d: Any = dist
    kept = [c10d.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)]
    port = kept[0].port
    patience = timedelta(seconds=2)
    store = c10d.TCPStore("127.0.0.1", port, 2, wait_for_workers=False, timeout=patience)
    monkeypatch.setattr(connections, "_get_default_store", lambda: store)
    c10d.PrefixStore("torchgpipe/(0, 7)/0", store).set("rank 0 is here", "process 5 on elsewhere")
    twice = (
        r"rank 0 is already taken by process 5 on elsewhere, but process \d+ on .* has the same "
        "rank: start each rank only once"
    )
    with pytest.raises(RankFailed, match=twice):
        connections.Connections([0, 7], 0, None)
    kept.clear()
    ended = r"an unknown rank ended while rank 0 connected to others \("
    with pytest.raises(RankFailed, match=ended):
        connections.Connections([0, 7], 0, None)


def test_a_rank_says_what_it_waits_for_and_ends() -> None:
    program = (
        "import time; from torchgpipe import patience\n"
        "patience.NOTICE, patience.LIMIT = 0.1, 0.2\n"
        "with patience.waiting_for('others'): time.sleep(60)"
    )
    process = python("-c", program)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert said == "waited 0.1 s for others\ngave up after 0.2 s of waiting for others\n"


class Look(NamedTuple):
    """One check of how busy this process is, and the result that the check must have.

    Attributes:
        seconds: The seconds since the last check.
        cpu: The CPU seconds that this process has used since the last check.
        task: The task that the rank runs.
        idle: The seconds without any work that `Idle.look` must return.
        descendants: The CPU seconds that child processes have used since the last check.
    """

    seconds: float
    cpu: float
    task: Any
    idle: float
    descendants: float = 0.0


TASK = "forward of micro-batch 0"


def looks(cpu: float, *idle: float) -> list[Look]:
    """Return made-up checks of how busy a process is, one each second, all in the same task.

    Args:
        cpu: The CPU seconds that the process uses between two checks.
        idle: For each check, the idle seconds that the check must return.
    """
    return [Look(1, cpu, TASK, seconds) for seconds in idle]


NOTHING = Look(1, 0, None, 0)
ENDED_CHILD = Look(1, 0, TASK, 0, -2.0)
LOOKS: dict[str, list[Look]] = {
    "clocks that are not read at once": looks(-1e-6, 0, *range(9)),
    "hangs after it has computed": looks(0.9, 0, 0, 0) + looks(0.01, *range(1, 9)),
    "other threads compute": looks(0.1, 0, *range(9)),
    "one task after another": [Look(1, 0, k, 0) for k in range(20)],
    "no task": [NOTHING] * 20,
    "the same task after none": [*looks(0, 0, 0, 1), NOTHING, *looks(0, 0, 0, 1, 2)],
    "a descendant computes": [Look(1, 0, TASK, 0, 0.03)] * 20,
    "a descendant has computed": [
        Look(1, 0, TASK, 0),
        Look(1, 0, TASK, 0, 1.0),
        *[Look(1, 0, TASK, k, 0.001) for k in range(1, 9)],
    ],
    "a descendant that is not counted any more": [
        *looks(0, 0, 0, 1),
        ENDED_CHILD,
        *looks(0, *range(1, 9)),
    ],
}


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replace the clocks that a check reads by numbers that the test sets.

    These are the clocks of real time, and of the CPU time of the process, of one thread, and of
    child processes.
    """
    now = SimpleNamespace(time=1000.0, process=1000.0, thread=0.0, descendants=1000.0)
    monkeypatch.setattr(time, "process_time", lambda: now.process)
    monkeypatch.setattr(time, "thread_time", lambda: now.thread)
    monkeypatch.setattr(idle, "cpu_time_of_descendants", lambda: now.descendants)
    return now


@pytest.mark.parametrize("name", LOOKS)
def test_how_long_a_task_has_been_idle(name: str, clocks: SimpleNamespace) -> None:
    others_compute = 0.1 if name == "other threads compute" else 0.0
    both = [Idle(others_compute), Idle(others_compute)]
    for look in LOOKS[name]:
        clocks.time += look.seconds
        clocks.process += look.cpu
        # The CPU time of the checks themselves must not count as work of the process. Here, two
        # pipelines have a checking thread each, and a check takes half a second of CPU time.
        clocks.thread += 0.5
        clocks.descendants += look.descendants
        for each in both:
            clocks.process += 0.5
            assert each.look(look.task, clocks.time) == look.idle


def test_cpu_time_counts_who_works_and_still_does_when_they_have_ended() -> None:
    before = cpu_time_of_descendants()
    with subprocess.Popen(GRANDCHILD, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        meanwhile = cpu_time_of_descendants()
        assert meanwhile - before >= 0.3 - 0.05  # the clock of CPU time is coarse
    assert cpu_time_of_descendants() > meanwhile - 0.005


def failing(wait: Callable[[], object]) -> Fails:
    fails = Fails()
    fails.at("forward", wait)
    return fails


X = torch.ones(1, requires_grad=True)
HERE = r"<lambda>, test_liveness.py:\d+"
REACH = r"reach of Fails, parts.py:\d+"


def hooked(wait: Callable[[], object]) -> nn.Module:
    layer = nn.Tanh()
    layer.register_forward_hook(lambda *_: wait())
    return nn.Sequential(layer)


# A function that a thread runs and that waits, and the place that is then reported.
PLACES: dict[str, tuple[Callable[[Callable[[], object]], object], str]] = {
    "a layer": (lambda wait: failing(wait)(X), REACH),
    "a hook": (
        lambda wait: hooked(wait)(X),
        rf"{HERE}, in forward of Sequential, container.py:\d+",
    ),
    "no layer": (lambda wait: wait(), HERE),
}


@pytest.mark.parametrize("run, said", PLACES.values(), ids=PLACES)
def test_where_a_thread_is(run: Callable[[Callable[[], object]], object], said: str) -> None:
    over = threading.Event()
    hanging = threading.Thread(target=lambda: run(over.wait))
    hanging.start()
    ident = hanging.ident or 0

    def found() -> bool:
        return re.fullmatch(said, place(ident)) is not None

    try:
        assert_eventually(found, lambda: place(ident))
    finally:
        over.set()
        hanging.join(PATIENCE)
    assert place(ident) == "outside of Python code"


@contextmanager
def monitoring(
    timeout: float | None, heard: tuple[int, ...] = (), *, waits: bool = False
) -> Iterator[tuple[RankMonitor, Activity, SimpleQueue[str]]]:
    """Let rank 0 monitor three other ranks. Only the ranks in `heard` send messages."""
    wrong = SimpleQueue[str]()
    activity = Activity(wrong.put, [])
    label = Label(1, waits, "at home")
    made: list[RankMonitor] = []

    def tell(peer: int, own: Label) -> None:
        if peer in heard:
            for monitor in made:
                monitor.heard(peer, label)

    monitor = RankMonitor(0, [1, 2, 3], activity, timeout, tell)
    made.append(monitor)
    for peer in (1, 2, 3):
        monitor.heard(peer, label)
    try:
        yield monitor, activity, wrong
    finally:
        monitor.ended.set()
        monitor.thread.join()


def test_ranks_that_have_ended_are_named_where_all_others_wait() -> None:
    with (
        monitoring(0.5, heard=(1, 2), waits=True) as (monitor, activity, wrong),
        activity.call(4, "the call", None),
    ):
        beside = SimpleQueue[str]()
        Activity(beside.put, activity.beside)  # another pipeline's activity, where ranks may wait
        activity.hears = True
        monitor.forget(3)
        expected = "ranks 1, 2 were at home; rank 3 had ended. Has a rank left out"
        for told in (wrong, beside):
            assert expected in told.get(timeout=10)


def test_ranks_on_gpus_may_wait_for_a_slow_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that ranks that wait for each other are no error if another replica may be slow.

    The hosts do not see that their GPUs wait for the other replica.
    """
    for world, kind, slow in ((4, "cuda", False), (8, "cpu", False), (8, "cuda", True)):
        monkeypatch.setattr(dist, "get_world_size", lambda world=world: world)
        stages = {0: SimpleNamespace(modules=[], device=torch.device(kind))}
        program: Any = SimpleNamespace(doing="a task", computing=None, stages=stages)
        with (
            monitoring(0.5, heard=(1, 2, 3), waits=True) as (_, activity, wrong),
            activity.call(4, "the call", program),
        ):
            if slow:
                time.sleep(1.5)
                assert wrong.empty()
            else:
                assert "all ranks wait for each other" in wrong.get(timeout=10)


@pytest.mark.parametrize(
    "timeout, ended, task", [(0.5, (1, 3), ""), (None, (), ""), (0.5, (), "a task")]
)
def test_who_may_be_silent(
    timeout: float | None, ended: tuple[int, ...], task: str, monkeypatch: Any
) -> None:
    """Check which ranks may be silent for longer than the timeout.

    These are ranks that have ended, ranks without a timeout, and ranks that run a task of sharded
    layers. Such a task may have to wait for a slow rank of another pipeline.
    """
    # The processes of other tests' ranks use CPU time now and then.
    monkeypatch.setattr(idle, "cpu_time_of_descendants", lambda: 0.0)
    sharded = nn.Linear(1, 1)
    sharded.__class__ = type("Sharded", (FSDPModule, nn.Linear), {})  # as fully_shard does
    stages = {0: SimpleNamespace(modules=[nn.Sequential(sharded), sharded])}
    program: Any = SimpleNamespace(doing=task, computing=task, stages=stages)
    heard = (1, 2, 3) if task else (2,)
    with monitoring(timeout, heard=heard) as (monitor, activity, wrong):
        for rank in ended:
            monitor.forget(rank)
        with activity.call(4, "the call", program) if task else nullcontext():
            time.sleep(1.5)
            assert wrong.empty()


ENDS = """
import threading, time
from types import SimpleNamespace
from torchgpipe.distributed.liveness.ending import end_with_process

called = SimpleNamespace(activity=SimpleNamespace(thread=0))

class Connected:
    liveness = called

    def close(self):
        print("closed")

    def fail(self, error):
        print(error)

def wait():
    time.sleep(1)
    print("a thread is over")

connected = Connected()
end_with_process(connected)
threading.Thread(target=wait).start()
"""
EXITS = "import sys; called.activity.thread = threading.get_ident(); sys.exit(1)"
# What the main thread does at its end, and what is printed first. Each process has to import torch.
ENDINGS = [
    pytest.param("0 / 0", "division by zero\na thread"),
    pytest.param("", "a thread is over\nclosed", marks=pytest.mark.slow),
    pytest.param(EXITS, "closed\na thread", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("end, first", ENDINGS)
def test_others_hear_at_once_that_the_main_thread_has_ended(end: str, first: str) -> None:
    said, _ = python("-c", ENDS + end).communicate(timeout=PATIENCE)
    assert said.startswith(first)
