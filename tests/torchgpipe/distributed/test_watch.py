"""Where a rank stops, hangs, dies, or leaves out a call, all others end in time with one error; not so if it is slow.

Ranks are processes, forked from one that has imported torch, with a session of their own, so that nobody but a test
stops or continues them.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchgpipe import is_recomputing
from torchgpipe.distributed import DistributedGPipe
from torchgpipe.distributed.watch import Activity, Label, Watch

WORLD = 3
VICTIM = 1
SILENCE = 2.0
PATIENCE = 20.0


class Point(nn.Module):
    """A layer whose rank does something else at a point, once."""

    def __init__(self) -> None:
        super().__init__()
        self.does: dict[str, Callable[[], object]] = {}

    def reached(self, point: str) -> None:
        self.does.pop(point, bool)()

    def forward(self, x: Tensor) -> Tensor:
        self.reached("recomputation" if is_recomputing() else "forward")
        y = x.view_as(x)
        if y.requires_grad:
            y.register_hook(lambda grad: self.reached("backward"))
        return y


def stops() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raises() -> None:
    raise ValueError("on purpose")


def ends() -> None:
    raise SystemExit


def hangs() -> None:
    time.sleep(10 * PATIENCE)


def sleeps() -> None:
    time.sleep(1.5 * SILENCE)


def computes() -> None:
    end = time.monotonic() + 1.5 * SILENCE
    while time.monotonic() < end:
        sum(range(1000))


def all_stop() -> None:
    """Wait until the test has stopped all ranks for a while."""
    time.sleep(0.5)


@dataclass
class Case:
    """What a rank does at a point of mini-batch 2, and the error of the others, a pattern; empty if nothing is wrong.

    Without `does`, it leaves out the backward. `own` is the error of that rank.
    """

    does: Callable[[], object] | None
    point: str = "outside"
    others: str = ""
    own: str = ""
    rank: int = 1


SILENT = (
    r"rank 1 has given no sign of life for 2 s: is its process stopped, or is the network cut\? When last heard of, "
)
WOKEN = r"rank 1 did not run for \d+\.\d s \(was its process stopped\?\), so others have ended"
DIED = r"rank 1 has closed its connections and given no reason: has its process ended\? \d.\d s before, it was "
CIRCLE = (
    "all ranks wait for each other, and none has got any further for 2 s: rank 0 was waiting for other ranks in "
    "backward of micro-batch 1 of mini-batch 2; rank 1 was waiting for other ranks in the call of mini-batch 3; rank 2 "
    r"was .*\. Has a rank left out a call of the pipeline, or a backward\(\)\?"
)


def hanging(task: str, rank: int = 1) -> str:
    """Return the error of the others."""
    return f"rank {rank} hangs in {task} of mini-batch 2: for 2 s it has neither ended nor used the CPU, in hangs, "


CASES = {
    "stopped in forward": Case(
        stops, "forward", SILENT + "rank 1 was in forward of micro-batch 0 of mini-batch 2", WOKEN
    ),
    "stopped in backward": Case(
        stops, "backward", SILENT + "rank 1 was in backward of micro-batch 1 of mini-batch 2", WOKEN
    ),
    "stopped outside": Case(stops, "outside", SILENT + "rank 1 was outside of the pipeline, after mini-batch 1", WOKEN),
    "killed in backward": Case(dies, "backward", DIED + "in backward of micro-batch 1 of mini-batch 2"),
    "killed outside": Case(dies, "outside", DIED + "outside of the pipeline, after mini-batch 1"),
    "raises outside": Case(
        raises,
        "outside",
        "rank 1 failed outside of the pipeline, after mini-batch 1: ValueError: on purpose",
        "on purpose",
    ),
    "ends early": Case(
        ends,
        "outside",
        r"rank 1 has ended, or called close\(\), but rank \d needs more from it: every rank has to call",
    ),
    "hangs in forward": Case(hangs, "forward", hanging("forward of micro-batch 0")),
    "hangs in recomputation": Case(hangs, "recomputation", hanging("recomputation of micro-batch 1")),
    "hangs in backward": Case(hangs, "backward", hanging("backward of micro-batch 1")),
    "hangs in the criterion": Case(hangs, "criterion", hanging("the criterion", 2), rank=2),
    "leaves out a backward": Case(None, others=CIRCLE, own=CIRCLE),
    "sleeps outside": Case(sleeps, "outside"),
    "computes in forward": Case(computes, "forward"),
    "stopped together, outside": Case(all_stop, "outside"),
    "stopped together, in forward": Case(all_stop, "forward"),
}


def rank_of(case: Case, rank: int, store: str, said: Any) -> None:
    """Train three steps; say when it gets to the point of the case, and how it ends."""
    os.setsid()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    layers = nn.Sequential(*(layer for _ in range(WORLD) for layer in (nn.Linear(4, 4), Point())))
    model = DistributedGPipe(layers, [2] * WORLD, chunks=2, checkpoint="always", silence=SILENCE)
    point = model.partition[1]
    assert isinstance(point, Point)

    def begins() -> None:
        time.sleep(SILENCE / 3)  # in which others hear of the point
        said.send(("", time.monotonic()))
        if case.does is not None:
            case.does()

    def criterion(output: Tensor, target: Tensor) -> Tensor:
        point.reached("criterion")
        return (output - target).square().mean()

    try:
        for step in range(1, 4):
            if rank == case.rank and step == 2:
                point.does = {case.point: begins}
            point.reached("outside")
            loss = model.loss(criterion, torch.rand(4, 4), torch.rand(4, 4))
            if case.does is not None or rank != case.rank or step != 2:
                loss.backward()
    except BaseException as error:
        said.send((str(error), time.monotonic()))
        raise
    said.send(("", time.monotonic()))


def started(method: str, *args: Any) -> None:
    """Start a rank, and wait for it. This process has not used autograd: a fork could not go on with its threads."""
    context: Any = get_context(method)
    process = context.Process(target=rank_of, args=args)
    process.start()
    process.join()


@pytest.mark.parametrize(
    "name, method", [*product(CASES, ["forkserver"]), ("raises outside", "fork"), ("raises outside", "spawn")]
)
def test_all_end(name: str, method: str, tmp_path: Path) -> None:
    """Processes of `multiprocessing` say why they end, however they were started."""
    case = CASES[name]
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    processes, heard = [], []
    for rank in range(WORLD):
        here, there = context.Pipe(duplex=False)
        args = (case, rank, str(tmp_path / "store"), there)
        process = context.Process(target=rank_of, args=args, daemon=True)
        if method != "forkserver":
            process = context.Process(target=started, args=(method, *args))
        process.start()
        there.close()
        heard.append(here)
        processes.append(process)
    try:
        assert heard[case.rank].poll(5 * PATIENCE)  # it may import torch first
        _, begin = heard[case.rank].recv()
        if case.does is all_stop:
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for process in processes:
                    os.kill(process.pid or 0, number)
                time.sleep(1.5 * SILENCE)
        for rank in {*range(WORLD)} - {case.rank}:
            assert heard[rank].poll(PATIENCE), "it does not end"
            error, end = heard[rank].recv()
            assert re.match(case.others or "$", error), error
            assert end - begin < SILENCE + 2 or not case.others
        if case.does is stops:
            os.kill(processes[case.rank].pid or 0, signal.SIGCONT)
        if case.does not in (dies, hangs):
            assert heard[case.rank].poll(PATIENCE)
            error, _ = heard[case.rank].recv()
            assert re.match(case.own or "$", error), error
    finally:
        for process in processes:
            with suppress(OSError):
                process.kill()


@contextmanager
def watching(
    silence: float | None, heard: tuple[int, ...] = (), *, waits: bool = False
) -> Iterator[tuple[Watch, Activity, SimpleQueue[str]]]:
    """Let rank 0 watch three others, of which some are heard all the time."""
    activity, wrong = Activity(), SimpleQueue[str]()
    label = Label(1, waits, "at home")

    made: list[Watch] = []

    def beat(peer: int, own: Label) -> None:
        for watch in made * (peer in heard):
            watch.heard(peer, label)

    watch = Watch(0, [1, 2, 3], activity, silence, beat, wrong.put)
    made.append(watch)
    for peer in (1, 2, 3):
        watch.heard(peer, label)
    try:
        yield watch, activity, wrong
    finally:
        watch.stop()
        watch.thread.join()


def test_ranks_that_are_cut_off_together_are_named_together() -> None:
    with watching(0.5, heard=(2,)) as (_, _, wrong):
        assert wrong.get(timeout=PATIENCE) == (
            "ranks 1, 3 have given no sign of life for 0.5 s: are their processes stopped, or is the network cut? When "
            "last heard of, ranks 1, 3 were at home"
        )


@pytest.mark.parametrize("silence", [0.5, None])
def test_a_rank_that_has_ended_may_be_silent(silence: float | None) -> None:
    with watching(silence, heard=(2,)) as (watch, _, wrong):
        if silence is not None:
            watch.forget(1)
            watch.forget(3)
        time.sleep(1.5)
        assert wrong.empty()


def test_ranks_that_have_ended_are_named_where_all_others_wait() -> None:
    with (
        watching(0.5, heard=(1, 2), waits=True) as (watch, activity, wrong),
        activity.call(4, "the call", None),
        activity.hearing(),
    ):
        watch.forget(3)
        assert "ranks 1, 2 were at home; rank 3 had ended. Has a rank left out" in wrong.get(timeout=PATIENCE)


@pytest.mark.usefixtures("without_ranks")
@pytest.mark.parametrize("shards", [False, True])
def test_a_task_that_hangs(shards: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With sharded layers it may wait for a rank of another pipeline."""
    monkeypatch.setattr("torchgpipe.distributed.watch.sharded", lambda modules: set(modules) if shards else set())
    program: Any = SimpleNamespace(doing="a task", computing="a task", stage=SimpleNamespace(partition=nn.Linear(1, 1)))
    with watching(0.5, heard=(1, 2, 3)) as (_, activity, wrong), activity.call(4, "the call", program):
        if shards:
            time.sleep(1.5)
            assert wrong.empty()
        else:
            assert wrong.get(timeout=PATIENCE).startswith("rank 0 hangs in a task of mini-batch 4: for 0.5 s it has ")


def test_labels_have_one_size() -> None:
    """Messages of another shape would be described anew, and descriptions are kept."""
    for words in ("", "outside", "ü" * 500):
        packed = Label(7, True, words).packed()
        assert len(packed) == len(Label(0, False, "").packed())
        assert Label.unpacked(packed) == Label(7, True, words[:100])
