"""See whether pipelines still overlap, without a clock: tasks that meet.

    python -m benchmarks.gates.meeting    # exit with 1 if tasks do not meet that the schedule lets run at once

A task waits until all those have begun that, in the replay of the schedule's lists, begin while it runs. Where the
pipeline lets them overlap, that is soon. Where it does not, no time would be enough, and a line names the task and who
did not come. A wait ends after a number of looks, not of seconds, and what was missed is tried again with many more: a
machine that is busy, or stands still, makes this slower, and changes no answer.

On simulated devices nobody waits: there the graph engine's work gets the times that its streams leave it.
"""

import faulthandler
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from itertools import islice
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
from torchgpipe.tensors.observe import Task

N, M = 4, 6  # devices, micro-batches
LOOKS, MANY = 250, 2500  # looks at who has begun: at first, and to be sure
PAUSE = 0.002  # seconds between looks
LOST = "lost"


class Scene(NamedTuple):
    """A training step, by `step` but for GPipe, or without `grad` a forward. Each action takes one unit of time.

    With `ahead`, each stage's first action of a direction takes two: every sender gets ahead.
    """

    mode: Mode
    ahead: bool = False
    grad: bool = True
    schedule: str = "GPipe"

    def __str__(self) -> str:
        name = f"{self.schedule}, " * (self.schedule != "GPipe")
        return (
            f"{name}{self.mode}{', senders ahead' * self.ahead}{', forward only' * (not self.grad)}"
        )

    def seconds(self, action: Action) -> float:
        """Return how long an action takes in the schedule."""
        return 1.0 + (self.ahead and action[:2] in (("forward", 0), ("backward", M - 1)))


SCENES = (*map(Scene, MODES), Scene("never", ahead=True), Scene("never", ahead=True, grad=False))
STEPS = tuple(
    Scene(mode, schedule=name) for name in ("1F1B", "Interleaved1F1B", "ZBH1") for mode in MODES
)


def spans(scene: Scene, copy: float = 0.0) -> dict[str, tuple[float, float]]:
    """Return when each action begins and ends by the schedule; and each copy, if copies take time.

    Where they do, on simulated devices, a boundary has room for any number of items, and else for one.
    """
    schedule = make(scene.schedule, N, M, checkpoint=scene.mode)
    pairs = [
        (action, other) for action in schedule.actions for other in needs(action, schedule.actions)
    ]
    sent = {other for action, other in pairs if other.stage != action.stage}
    copies = [(s, s + 1, copy) for s in range(len(schedule.placement) - 1)]
    run = schedule.replay(
        scene.seconds, copies, None if copy else 1, loss=0.0 if scene.schedule == "GPipe" else None
    )
    times = dict[str, tuple[float, float]]()
    for kind, i, s, start, end in run.tasks:
        action = Action(kind, i, s)
        if scene.grad or action.kind == "forward":
            times[str(action)] = start, end
            if copy and action in sent:
                times[f"copy after {action}"] = end, end + copy
    return times


def mates(times: dict[str, tuple[float, float]]) -> dict[str, list[str]]:
    """Return, for each piece of work, all that begin while it runs."""
    return {
        work: [
            other for other, (begins, _) in times.items() if start <= begins < end and other != work
        ]
        for work, (start, end) in times.items()
    }


class Board:
    """Where the tasks of a scene meet. It is at a `store`, which threads or processes share."""

    def __init__(self, scene: Scene, looks: int) -> None:
        self.scene, self.looks, self.mates = scene, looks, mates(spans(scene))
        self.store: Any = None

    def begins(self, task: Task) -> AbstractContextManager[object]:
        """Wait until all mates have begun, at most for so many looks, or until another task has waited in vain."""
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
        """Run a step twice, as a pipeline's first mini-batch is unlike later ones; say who waited for whom in vain."""
        model.observer = self.begins
        for k in "12":
            self.store = dist.PrefixStore(k, store)  # type: ignore[attr-defined]
            step(self.scene, model)
            after()
            if self.store.check([LOST]):
                return str(self.store.get(LOST).decode())
        return None


def step(scene: Scene, model: Any, between: Callable[[], object] = lambda: None) -> None:
    """Run forward, and backward if the scene has it."""
    gpipe = scene.schedule == "GPipe"
    with torch.set_grad_enabled(scene.grad):
        loss = (model.loss if gpipe else model.step)(lambda y, _: y.sum(), torch.ones(M, 1), None)
    if gpipe and scene.grad:
        between()
        loss.backward()


def pipeline(scene: Scene, devices: Sequence[Any], engine: Any) -> GPipe:
    """Return a pipeline that runs a scene, with a layer for each stage."""
    n = len(make(scene.schedule, N, M).placement)
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(n)))
    given: Any = {
        "devices": devices,
        "chunks": M,
        "checkpoint": scene.mode,
        "schedule": scene.schedule,
    }
    return GPipe(model, [1] * n, engine=engine, **given)


def over_workers(scene: Scene, looks: int) -> str | None:
    """Run a scene in threads."""
    model = pipeline(scene, ["cpu"] * N, "workers")
    return Board(scene, looks).twice(dist.HashStore(), model)  # type: ignore[attr-defined]


def on_rank(scene: Scene, looks: int, store: Any) -> str | None:
    """Run a scene as a rank; all of them share `store`, which has to be new."""
    layers = nn.Sequential(*(nn.Linear(1, 1) for _ in range(N)))
    with closing(DistributedGPipe(layers, [1] * N, chunks=M, checkpoint=scene.mode)) as model:
        return Board(scene, looks).twice(store, model, dist.barrier)


class Ranks:
    """Processes that run scenes. They are forked: so make this before there are other threads."""

    def __init__(self) -> None:
        self._launched = Launched("fork", N, _serve)
        self._store: Any = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # type: ignore[attr-defined]
        self._launched.send(self._store.port)
        self.close = self._launched.close
        self._runs = 0

    def run(self, scene: Scene, looks: int) -> str | None:
        """Run a scene."""
        self._runs += 1
        self._launched.send((str(self._runs), scene, looks))
        running, answer = {*range(N)}, None
        while running:
            for k, answer in self._launched.receive(running):
                if isinstance(answer, Ended):
                    raise Error(f"meeting: rank {k} ended {answer.how}")
                running.remove(k)
        return answer


def _serve(k: int, link: Connection) -> None:
    store: Any = dist.TCPStore("127.0.0.1", link.recv(), None, False)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=dist.PrefixStore("ranks", store), rank=k, world_size=N)  # type: ignore[attr-defined]
    while True:
        run, scene, looks = link.recv()
        link.send(on_rank(scene, looks, dist.PrefixStore(run, store)))  # type: ignore[attr-defined]


def on_devices(scene: Scene, looks: int = 0) -> str | None:
    """Run a scene with the graph engine on simulated devices, where a copy takes as long as a task."""
    found = dict[str, tuple[float, float]]()
    devices = [torch.device("cpu", j) for j in range(N)]

    @contextmanager
    def times(task: Task) -> Iterator[None]:
        action = Action(*task)
        if task.kind != "copy":
            found[str(action)] = streams.of(devices[task.partition]).run(scene.seconds(action))  # type: ignore[union-attr]
        yield
        if task.kind == "copy":
            end = streams.current[-1].clock
            backward = any(work.startswith("backward") for work in found)
            found[f"copy after {action._replace(kind='backward' if backward else 'forward')}"] = (
                end - 1.0,
                end,
            )

    with pytest.MonkeyPatch.context() as patch:
        streams = Streams(patch, {(j, j + 1): 1.0 for j in range(N - 1)})
        model = pipeline(scene, devices, "graph")
        model.observer = times
        step(scene, model, streams.synchronize)  # as printing the loss would
    expected = spans(scene, 1.0)
    for work, others in sorted(mates(expected).items(), key=lambda item: expected[item[0]]):
        for other in others:
            if found[other][0] >= found[work][1]:
                return f"{other} did not begin while {work} ran"
    return None


def main(arguments: Sequence[str] | None = None) -> None:
    """Run every scene on every engine; say what was lost, one line for each engine."""
    command("gates.meeting", __doc__, json=False).parse_args(arguments)
    lines = []
    with closing(Ranks()) as ranks:
        for engine, run in (
            ("ranks", ranks.run),
            ("workers", over_workers),
            ("simulated devices", on_devices),
        ):
            scenes = SCENES + STEPS * (run is over_workers)
            lost = (
                (scene, line)
                for scene in scenes
                if run(scene, LOOKS) and (line := run(scene, MANY))
            )
            lines += [f"{engine}, {scene}: {line}" for scene, line in islice(lost, 1)]
    if lines:
        raise SystemExit("\n".join(lines))
    print(
        f"all tasks meet, in {len(SCENES)} cases on each engine and {len(STEPS)} of step() by workers"
    )


if __name__ == "__main__":
    faulthandler.dump_traceback_later(600, exit=True)  # it takes seconds, unless a pipeline hangs
    main()
