"""Run scenes (training steps) on all engines, and find tasks that should overlap but do not."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from benchmarks.gates.scenes import (
    ON_RANKS,
    SCENES,
    STEPS,
    M,
    N,
    Scene,
    Times,
    inside,
    layers,
    mates,
    pipeline,
    spans,
    step,
)
from benchmarks.simulated import Streams
from reproduce.run.engines.ranks import Ranks
from torchgpipe.distributed import DistributedGPipe
from torchgpipe.schedules import Action
from torchgpipe.tensors.observe import Kind, Task

LOOKS = 250
"""How many times a waiting task looks which other tasks have begun."""
MANY = 2500
"""How many times a waiting task looks if the step is run again."""
PAUSE = 0.002
"""Seconds between two looks."""
LOST = "lost"


Run = Callable[[Scene, int], str | None]
"""A function that runs a scene with a number of looks, and returns a line if tasks do not meet."""


class Board:
    """A store that threads or processes share, and in which each task notes that it has begun.

    A task uses the store to wait until the tasks that should overlap with it have begun.
    """

    def __init__(self, scene: Scene, looks: int) -> None:
        self.scene = scene
        self.looks = looks
        self.mates = mates(spans(scene))
        self.store: Any = None

    @contextmanager
    def observe(self, task: Task) -> Iterator[None]:
        """Let a task wait for the others, while its layers run.

        The second half of a split backward runs no code of a layer, so it waits when it begins.
        """
        name = str(Action(*task))
        if task.kind == "backward_weights":
            self.wait(name)
            yield
            return
        inside.call = partial(self.wait, name)
        try:
            yield
        finally:
            del inside.call

    def wait(self, name: str) -> None:
        """Note that a task has begun; wait until all tasks that should overlap with it have begun.

        The task gives up after `self.looks` looks into the store, or if another task gave up.
        """
        self.store.set(name, "")
        missing = self.mates[name]
        for _ in range(self.looks):
            missing = [mate for mate in missing if not self.store.check([mate])]
            if not missing or self.store.check([LOST]):
                return
            time.sleep(PAUSE)
        self.store.compare_set(LOST, "", f"{missing[0]} did not begin while {name} ran")

    def twice(
        self, store: Any, model: Any, after: Callable[[], object] = lambda: None
    ) -> str | None:
        """Run a step twice, because a pipeline treats its first mini-batch differently from others.

        Return a line about a task that gave up waiting, or `None`.
        """
        model.observer = self.observe
        for k in "12":
            self.store = dist.PrefixStore(k, store)  # type: ignore[attr-defined]
            step(self.scene, model)
            after()
            if self.store.check([LOST]):
                line: bytes = self.store.get(LOST)
                return line.decode()
        return None


def over_workers(scene: Scene, looks: int) -> str | None:
    """Run a scene (a training step) with an engine that has one thread for each partition.

    Return a one-line message if tasks do not overlap, otherwise `None`.
    """
    model = pipeline(scene, ["cpu"] * N, "workers")
    return Board(scene, looks).twice(dist.HashStore(), model)  # type: ignore[attr-defined]


def on_rank(store: Any, scene: Scene, looks: int) -> str | None:
    """Run a scene (a training step) as one rank of a distributed pipeline.

    All ranks share `store`, which has to be new. Return a one-line message if tasks do not overlap,
    otherwise `None`.
    """
    model = DistributedGPipe(
        layers(N), [1] * N, chunks=M, checkpoint=scene.mode, schedule=scene.schedule
    )
    with closing(model):
        return Board(scene, looks).twice(store, model, dist.barrier)


def on_devices(scene: Scene, looks: int = 0) -> str | None:
    """Check on simulated devices that tasks and copies of a scene (a training step) overlap.

    The step runs with the graph engine, the engine of `GPipe` for GPUs. A copy takes one unit of
    time, like most tasks. Return a one-line message about two tasks or copies that should overlap
    but do not, or `None`.
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


class Met(NamedTuple):
    """The result of one engine: whether tasks overlapped in all scenes (training steps).

    Attributes:
        engine: The name of the engine.
        cases: How many scenes were run on the engine.
        lost: A line about each of the engine's scenes whose tasks do not overlap.
    """

    engine: str
    cases: int
    lost: list[str]


def every(ranks: Ranks) -> list[Met]:
    """Run all scenes (training steps) on every engine; return a list with a `Met` per engine."""

    def on_ranks(scene: Scene, looks: int) -> str | None:
        answers: list[str | None] = ranks.run(on_rank, scene, looks)
        return answers[-1]

    engines: dict[str, tuple[Run, list[Scene]]] = {
        "ranks": (on_ranks, SCENES + ON_RANKS),
        "workers": (over_workers, SCENES + STEPS),
        "simulated devices": (on_devices, SCENES),
    }
    found = []
    for engine, (run, scenes) in engines.items():
        met = Met(engine, len(scenes), lost_scenes(engine, run, scenes))
        found.append(met)
    return found


def lost_scenes(engine: str, run: Run, scenes: Sequence[Scene]) -> list[str]:
    """Return a line about each scene (training step) whose tasks do not overlap.

    To be sure, such a scene is run a second time, in which waiting tasks wait much longer.
    """
    lost = []
    for scene in scenes:
        if run(scene, LOOKS):
            line = run(scene, MANY)
            if line:
                lost.append(f"{engine}, {scene}: {line}")
    return lost
