"""Check that the tasks of a pipeline overlap, without measuring time.

    python -m benchmarks.gates.meeting    # exit with 1 if tasks do not overlap that should

1. A replay of the schedule tells, for each task, which other tasks have to begin while it runs.
2. In the real pipeline, each task waits until these other tasks have begun. If the pipeline runs
   tasks one after another, some never begin during the wait, and the wait fails.
3. After a failed wait, the program prints the waiting task and a task that did not begin.

A waiting task looks into a shared store again and again. It gives up after a number of looks, not
after a number of seconds. Then the training step is run again with many more looks. So a busy
machine makes this program slower, but does not change its result.

On simulated devices no task waits. There, the clocks of the streams say when tasks begin and end.
"""

import faulthandler
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.harness import command
from benchmarks.simulated import Streams
from reproduce.error import Error
from reproduce.run.engines.launch import Ended, Launched
from torchgpipe import GPipe
from torchgpipe.distributed import DistributedGPipe
from torchgpipe.schedules import Action, make
from torchgpipe.schedules.action import needs
from torchgpipe.tensors.checkpoint import MODES, Mode
from torchgpipe.tensors.observe import Kind, Task

N, M = 4, 6
"""The numbers of devices and of micro-batches."""
LOOKS = 250
"""How many times a waiting task looks which other tasks have begun."""
MANY = 2500
"""How many times a waiting task looks if the step is run again."""
PAUSE = 0.002
"""Seconds between two looks."""
LOST = "lost"


Times = dict[str, tuple[float, float]]
"""When each action, or copy after an action, begins and ends."""
Run = Callable[["Scene", int], str | None]
"""A function that runs a scene with a number of looks, and returns a line if tasks do not meet."""


class Scene(NamedTuple):
    """A training step whose tasks are checked, or a forward without gradients.

    With the schedule `GPipe`, a forward and then a backward run. With other schedules, `model.step`
    runs. In the replay, an action takes one unit of time. If `ahead` is true, each stage's first
    forward and first backward take two units. Then every stage gets ahead of the stage that
    receives its results.
    """

    mode: Mode
    ahead: bool = False
    grad: bool = True
    schedule: str = "GPipe"

    def __str__(self) -> str:
        parts: list[str] = [self.mode]
        if self.schedule != "GPipe":
            parts.insert(0, self.schedule)
        if self.ahead:
            parts.append("senders ahead")
        if not self.grad:
            parts.append("forward only")
        return ", ".join(parts)

    def seconds(self, action: Action) -> float:
        """Return how many units of time an action takes in the schedule's replay."""
        first = action[:2] in (("forward", 0), ("backward", M - 1))
        return 2.0 if self.ahead and first else 1.0


SCENES = [Scene(mode) for mode in MODES]
SCENES += [Scene("never", ahead=True), Scene("never", ahead=True, grad=False)]
STEPS: list[Scene] = []
for name in ("1F1B", "Interleaved1F1B", "ZBH1"):
    STEPS += [Scene(mode, schedule=name) for mode in MODES]


def spans(scene: Scene, copy: float = 0.0) -> Times:
    """Return when each action of a schedule begins and ends, and each copy if copies take time.

    If `copy` (the units of time of a copy) is zero, the buffer between two stages has room for one
    activation or gradient. If not, as on simulated devices, the buffer has no limit.
    """
    schedule = make(scene.schedule, N, M, checkpoint=scene.mode)
    sent: set[Action] = set()
    for action in schedule.actions:
        for other in needs(action, schedule.actions):
            if other.stage != action.stage:
                sent.add(other)
    copies = [(s, s + 1, copy) for s in range(len(schedule.placement) - 1)]
    room = None if copy else 1
    loss = 0.0 if scene.schedule == "GPipe" else None
    run = schedule.replay(scene.seconds, copies, room, loss=loss)
    times: Times = {}
    for kind, i, s, start, end in run.tasks:
        action = Action(kind, i, s)
        if scene.grad or action.kind == "forward":
            times[str(action)] = start, end
            if copy and action in sent:
                times[f"copy after {action}"] = end, end + copy
    return times


def mates(times: Times) -> dict[str, list[str]]:
    """Return, for each action or copy, the others that begin while it runs."""
    found: dict[str, list[str]] = {}
    for work, (start, end) in times.items():
        found[work] = []
        for other, (begins, _) in times.items():
            if start <= begins < end and other != work:
                found[work].append(other)
    return found


class Board:
    """A store that threads or processes share, and in which each task notes that it has begun.

    A task uses the store to wait for the tasks that overlap with it.
    """

    def __init__(self, scene: Scene, looks: int) -> None:
        self.scene = scene
        self.looks = looks
        self.mates = mates(spans(scene))
        self.store: Any = None

    def begins(self, task: Task) -> AbstractContextManager[object]:
        """Note that a task has begun, and wait until all tasks that overlap with it have begun.

        The task gives up after `self.looks` looks into the store, or if another task gave up.
        """
        name = str(Action(*task))
        self.store.set(name, "")
        missing = self.mates[name]
        for _ in range(self.looks):
            missing = [mate for mate in missing if not self.store.check([mate])]
            if not missing or self.store.check([LOST]):
                return nullcontext()
            time.sleep(PAUSE)
        self.store.compare_set(LOST, "", f"{missing[0]} did not begin while {name} ran")
        return nullcontext()

    def twice(
        self, store: Any, model: Any, after: Callable[[], object] = lambda: None
    ) -> str | None:
        """Run a step twice, because a pipeline handles its first mini-batch unlike later ones.

        Return a line about a task that gave up waiting, or `None`.
        """
        model.observer = self.begins
        for k in "12":
            self.store = dist.PrefixStore(k, store)  # type: ignore[attr-defined]
            step(self.scene, model)
            after()
            if self.store.check([LOST]):
                line: bytes = self.store.get(LOST)
                return line.decode()
        return None


def step(scene: Scene, model: Any, between: Callable[[], object] = lambda: None) -> None:
    """Run the step of `scene`. With the schedule `GPipe`, call `between` before the backward."""
    gpipe = scene.schedule == "GPipe"
    run = model.loss if gpipe else model.step
    with torch.set_grad_enabled(scene.grad):
        loss = run(lambda y, _: y.sum(), torch.ones(M, 1), None)
    if gpipe and scene.grad:
        between()
        loss.backward()


def pipeline(scene: Scene, devices: Sequence[Any], engine: Any) -> GPipe:
    """Return a pipeline for the step of `scene`, with one layer for each stage."""
    n = len(make(scene.schedule, N, M).placement)
    return GPipe(
        _layers(n),
        [1] * n,
        devices=devices,
        chunks=M,
        checkpoint=scene.mode,
        schedule=scene.schedule,
        engine=engine,
    )


def _layers(n: int) -> nn.Sequential:
    layers = [nn.Linear(1, 1) for _ in range(n)]
    return nn.Sequential(*layers)


def over_workers(scene: Scene, looks: int) -> str | None:
    """Run the step of `scene` with an engine that has one thread for each partition.

    Return a one-line message if tasks do not overlap, otherwise `None`.
    """
    model = pipeline(scene, ["cpu"] * N, "workers")
    return Board(scene, looks).twice(dist.HashStore(), model)  # type: ignore[attr-defined]


def on_rank(scene: Scene, looks: int, store: Any) -> str | None:
    """Run the step of `scene` as one rank of a distributed pipeline.

    All ranks share `store`, which has to be new. Return a one-line message if tasks do not overlap,
    otherwise `None`.
    """
    model = DistributedGPipe(_layers(N), [1] * N, chunks=M, checkpoint=scene.mode)
    with closing(model):
        return Board(scene, looks).twice(store, model, dist.barrier)


class Ranks:
    """Processes that run training steps as the ranks of a distributed pipeline.

    The processes are forked, so create this object before the program starts other threads.
    """

    def __init__(self) -> None:
        self._launched = Launched("fork", N, _serve)
        tcp: Any = dist.TCPStore  # type: ignore[attr-defined]
        self._store = tcp("127.0.0.1", 0, None, True, wait_for_workers=False)
        self._launched.send(self._store.port)
        self.close = self._launched.close
        self._runs = 0

    def run(self, scene: Scene, looks: int) -> str | None:
        """Run the step of `scene` on all ranks; return a message if tasks do not overlap."""
        self._runs += 1
        self._launched.send((str(self._runs), scene, looks))
        running = set(range(N))
        answer = None
        while running:
            for k, answer in self._launched.receive(running):
                if isinstance(answer, Ended):
                    raise Error(f"meeting: rank {k} ended {answer.how}")
                running.remove(k)
        return answer


def _serve(k: int, link: Connection) -> None:
    store: Any = dist.TCPStore("127.0.0.1", link.recv(), None, False)  # type: ignore[attr-defined]
    ranks = dist.PrefixStore("ranks", store)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=ranks, rank=k, world_size=N)
    while True:
        run, scene, looks = link.recv()
        shared = dist.PrefixStore(run, store)  # type: ignore[attr-defined]
        link.send(on_rank(scene, looks, shared))


def on_devices(scene: Scene, looks: int = 0) -> str | None:
    """Run the step of `scene` with the graph engine on simulated devices.

    A copy takes as long as a task. Return a one-line message if tasks do not overlap, otherwise
    `None`.
    """
    found = _times_on_devices(scene)
    expected = spans(scene, 1.0)
    mates_of = mates(expected)
    for work in sorted(mates_of, key=expected.__getitem__):
        _, end = found[work]
        for other in mates_of[work]:
            begin, _ = found[other]
            if begin >= end:
                return f"{other} did not begin while {work} ran"
    return None


def _times_on_devices(scene: Scene) -> Times:
    found: Times = {}
    devices = [torch.device("cpu", j) for j in range(N)]
    direction: Kind = "forward"

    @contextmanager
    def observe(task: Task) -> Iterator[None]:
        nonlocal direction
        action = Action(*task)
        if task.kind == "copy":
            yield
            end = streams.current[-1].clock
            copied = action._replace(kind=direction)
            found[f"copy after {copied}"] = end - 1.0, end
        else:
            if task.kind.startswith("backward"):
                direction = "backward"
            stream: Any = streams.of(devices[task.partition])
            found[str(action)] = stream.run(scene.seconds(action))
            yield

    with pytest.MonkeyPatch.context() as patch:
        streams = Streams(patch, {(j, j + 1): 1.0 for j in range(N - 1)})
        model = pipeline(scene, devices, "graph")
        model.observer = observe
        step(scene, model, streams.synchronize)  # a program that prints the loss waits here, too
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all scenes on every engine; print the first one of each engine that does not overlap."""
    command("gates.meeting", __doc__, record=False).parse_args(arguments)
    with closing(Ranks()) as ranks:
        lost = [
            _first_lost("ranks", ranks.run, SCENES),
            _first_lost("workers", over_workers, SCENES + STEPS),
            _first_lost("simulated devices", on_devices, SCENES),
        ]
    lines = [line for line in lost if line is not None]
    if lines:
        raise SystemExit("\n".join(lines))
    cases = f"{len(SCENES)} cases on each engine and {len(STEPS)} of step() by workers"
    print(f"all tasks meet, in {cases}")


def _first_lost(engine: str, run: Run, scenes: Sequence[Scene]) -> str | None:
    """Return a message about the first scene whose tasks do not overlap, or `None`.

    To be sure, such a scene is run a second time, with many more looks.
    """
    for scene in scenes:
        if run(scene, LOOKS):
            line = run(scene, MANY)
            if line:
                return f"{engine}, {scene}: {line}"
    return None


if __name__ == "__main__":
    faulthandler.dump_traceback_later(600, exit=True)  # it takes seconds, unless a pipeline hangs
    main()
