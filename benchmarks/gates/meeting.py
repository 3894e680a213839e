"""See whether pipelines still overlap, without a clock: tasks that meet.

    python -m benchmarks.gates.meeting    # exit with 1 if tasks do not meet that the schedule lets run at once

A task waits in its layer until all those have begun that, by the schedule, begin while it runs. Where the pipeline lets
them overlap, that is soon. Where it does not, no time would be enough, and a line names the task and who did not come.
A wait ends after a number of looks, not of seconds, and what was missed is tried again with many more: a machine that
is busy, or stands still, makes this slower, and changes no answer.

On simulated devices nobody waits: there the graph engine's work gets the times that its streams leave it.
"""

import faulthandler
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.harness import command
from benchmarks.simulated import Streams, working
from reproduce.error import Error
from reproduce.run.engines.launch import Ended, Launched
from torchgpipe import GPipe
from torchgpipe.distributed import DistributedGPipe
from torchgpipe.plan.replay import Costs, replay
from torchgpipe.tensors.checkpoint import MODES, Mode, checkpointed

N, M = 4, 6  # partitions, micro-batches
LOOKS, MANY = 250, 2500  # looks at who has begun: at first, and to be sure
PAUSE = 0.002  # seconds between looks
LOST = "lost"


class Work(NamedTuple):
    """A task, or a copy to the next partition."""

    kind: str
    micro_batch: int
    partition: int

    def __str__(self) -> str:
        return f"{self.kind} of micro-batch {self.micro_batch} on partition {self.partition}"


class Scene(NamedTuple):
    """A training step or, without `grad`, a forward. Each task takes one unit of time in the schedule.

    With `ahead`, each partition's first task takes two, but for the partition that begins: every sender gets ahead.
    """

    mode: Mode
    ahead: bool = False
    grad: bool = True

    def __str__(self) -> str:
        return f"{self.mode}{', senders ahead' * self.ahead}{', forward only' * (not self.grad)}"


SCENES = (*map(Scene, MODES), Scene("never", ahead=True), Scene("never", ahead=True, grad=False))


def costs(scene: Scene, copy: float = 0.0) -> Costs:
    """Return how long each task takes in the schedule."""
    slow = float(scene.ahead)
    forward = [[1 + slow * (i == 0 and j > 0) for j in range(N)] for i in range(M)]
    backward = [[1 + slow * (i == M - 1 and j < N - 1) for j in range(N)] for i in range(M)]
    recomputed = checkpointed(scene.mode, M) if scene.grad else 0
    return Costs(forward, backward, [[float(i < recomputed)] * N for i in range(M)], copy)


def schedule(scene: Scene, copy: float = 0.0, *, announced: bool = False) -> dict[Work, tuple[float, float]]:
    """Return when each task, and each copy if it takes time, begins and ends by the schedule.

    Where gradients are `announced`, a recomputation begins with the task that its gradient comes from, not earlier.
    """
    times = {Work(kind, i, j): (start, end) for kind, i, j, start, end in replay(costs(scene, copy)).events}
    if not scene.grad:
        times = {work: span for work, span in times.items() if work.kind == "forward"}
    for work in [work for work in times if work.kind == "recompute" and announced]:
        start = max(times[work][0], times.get(Work("backward", work.micro_batch, work.partition + 1), (0.0,))[0])
        times[work] = start, start + 1
    last = {"forward": N - 1, "backward": 0}
    for (kind, i, j), (_, end) in list(times.items()) if copy else ():
        if j != last.get(kind, j):
            times[Work(f"copy after {kind}", i, j)] = end, end + copy
    return times


def mates(times: dict[Work, tuple[float, float]]) -> dict[Work, list[Work]]:
    """Return, for each piece of work, all that begin while it runs."""
    return {
        work: [other for other, (begins, _) in times.items() if start <= begins < end and other != work]
        for work, (start, end) in times.items()
    }


class Layer(nn.Module):
    """Partition `j`, which calls `does` in each of its tasks. A sample is the number of its micro-batch."""

    def __init__(self, j: int, does: Callable[[Work], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.j, self.does = j, does

    def forward(self, x: Tensor) -> Tensor:
        i = int(x)
        return working(x, lambda kind: self.does(Work(kind, i, self.j)), self.weight)


def layers(does: Callable[[Work], None]) -> nn.Sequential:
    """Return a layer for each partition."""
    return nn.Sequential(*(Layer(j, does) for j in range(N)))


class Board:
    """Where the tasks of a scene meet. It is at a `store`, which threads or processes share."""

    def __init__(self, scene: Scene, looks: int) -> None:
        self.scene, self.looks, self.mates = scene, looks, mates(schedule(scene, announced=True))
        self.store: Any = None

    def begins(self, task: Work) -> None:
        """Wait until all mates have begun, at most for so many looks, or until another task has waited in vain."""
        self.store.set(str(task), "")
        missing = [*map(str, self.mates[task])]
        for _ in range(self.looks):
            missing = [mate for mate in missing if not self.store.check([mate])]
            if not missing or self.store.check([LOST]):
                return
            time.sleep(PAUSE)
        self.store.compare_set(LOST, "", f"{missing[0]} did not begin while {task} ran")

    def twice(self, store: Any, model: Any, after: Callable[[], object] = lambda: None) -> str | None:
        """Run a step twice, as a pipeline's first mini-batch is unlike later ones; say who waited for whom in vain."""
        for k in "12":
            self.store = dist.PrefixStore(k, store)  # type: ignore[attr-defined]
            step(self.scene, model)
            after()
            if self.store.check([LOST]):
                return str(self.store.get(LOST).decode())
        return None


def step(scene: Scene, model: Any, between: Callable[[], object] = lambda: None) -> None:
    """Run forward, and backward if the scene has it."""
    with torch.set_grad_enabled(scene.grad):
        loss = model.loss(lambda y, _: y.sum(), torch.arange(M).float(), None)
    if scene.grad:
        between()
        loss.backward()


def over_workers(scene: Scene, looks: int) -> str | None:
    """Run a scene in threads."""
    board = Board(scene, looks)
    model = GPipe(layers(board.begins), [1] * N, devices=["cpu"] * N, chunks=M, checkpoint=scene.mode, engine="workers")
    return board.twice(dist.HashStore(), model)  # type: ignore[attr-defined]


def on_rank(scene: Scene, looks: int, store: Any) -> str | None:
    """Run a scene as a rank; all of them share `store`, which has to be new."""
    board = Board(scene, looks)
    with closing(DistributedGPipe(layers(board.begins), [1] * N, chunks=M, checkpoint=scene.mode)) as model:
        return board.twice(store, model, dist.barrier)


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
    lasts, found = costs(scene, 1.0), dict[Work, tuple[float, float]]()
    devices = [torch.device("cpu", j) for j in range(N)]

    def takes(work: Work) -> None:
        kind, i, j = work
        found[work] = streams.of(devices[j]).run(getattr(lasts, kind)[i][j])  # type: ignore[union-attr]

    @contextmanager
    def copies(task: Any) -> Iterator[None]:
        yield
        if task.kind == "copy":
            end = streams.current[-1].clock
            after = "backward" if any(work.kind == "backward" for work in found) else "forward"
            found[Work(f"copy after {after}", task.micro_batch, task.partition)] = end - 1.0, end

    with pytest.MonkeyPatch.context() as patch:
        streams = Streams(patch, {(j, j + 1): 1.0 for j in range(N - 1)})
        model = GPipe(layers(takes), [1] * N, devices=devices, chunks=M, checkpoint=scene.mode, engine="graph")
        model.observer = copies
        step(scene, model, streams.synchronize)  # as printing the loss would
    times = schedule(scene, 1.0)
    for work, others in sorted(mates(times).items(), key=lambda item: times[item[0]]):
        for other in others:
            if found[other][0] >= found[work][1]:
                return f"{other} did not begin while {work} ran"
    return None


def main(arguments: Sequence[str] | None = None) -> None:
    """Run every scene on every engine; say what was lost, one line for each engine."""
    command("gates.meeting", __doc__, json=False).parse_args(arguments)
    lines = []
    with closing(Ranks()) as ranks:
        for engine, run in (("ranks", ranks.run), ("workers", over_workers), ("simulated devices", on_devices)):
            lost = ((scene, line) for scene in SCENES if run(scene, LOOKS) and (line := run(scene, MANY)))
            lines += [f"{engine}, {scene}: {line}" for scene, line in islice(lost, 1)]
    if lines:
        raise SystemExit("\n".join(lines))
    print(f"all tasks meet: {len(SCENES)} schedules by workers, by ranks and on simulated devices")


if __name__ == "__main__":
    faulthandler.dump_traceback_later(600, exit=True)  # it takes seconds, unless a pipeline hangs
    main()
