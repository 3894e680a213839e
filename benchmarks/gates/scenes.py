"""Training steps whose tasks have to overlap, and simulations of when each task has to run."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchgpipe import GPipe
from torchgpipe.schedules import Action, make
from torchgpipe.schedules.action import needs
from torchgpipe.tensors.checkpoint import MODES, Mode

N, M = 4, 6
"""The numbers of devices and of micro-batches."""

Times = dict[str, tuple[float, float]]
"""When each action, or copy after an action, begins and ends."""


class Scene(NamedTuple):
    """A training step whose tasks are checked, or a forward without gradients.

    With the schedule `GPipe`, a forward and then a backward run. With other schedules, `model.step`
    runs.

    Attributes:
        mode: The checkpoint mode.
        ahead: Whether, in the simulation of the schedule, the first forward and the first backward
            of each stage take two units of time, and all other actions take one unit. Then each
            stage sends results while the receiving stage is still busy.
        grad: Whether the step has a backward.
        schedule: The name of the schedule.
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
        """Return how long an action takes, in units of time, when the schedule is simulated."""
        first = action[:2] in (("forward", 0), ("backward", M - 1))
        return 2.0 if self.ahead and first else 1.0


SCENES = [Scene(mode) for mode in MODES]
SCENES += [Scene("never", ahead=True), Scene("never", ahead=True, grad=False)]
STEPS: list[Scene] = []
for name in ("1F1B", "Interleaved1F1B", "ZBH1"):
    STEPS += [Scene(mode, schedule=name) for mode in MODES]
ON_RANKS = [scene for scene in STEPS if scene.schedule != "Interleaved1F1B"]
"""The steps of ranks, which have one stage each."""


def spans(scene: Scene, copy: float = 0.0) -> Times:
    """Simulate a step, and return when each action begins and ends.

    `copy` is the time of a copy between two stages. If it is zero, as for threads and ranks, the
    buffer between two stages has room for one activation or gradient. Otherwise, as on simulated
    devices, the buffer has no limit, and the result also says when each copy begins and ends.
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
    """Return which actions and copies of a simulated step overlap.

    The result maps the name of each action or copy to a list of names: those of all other actions
    and copies that begin while it runs.
    """
    found: dict[str, list[str]] = {}
    for work, (start, end) in times.items():
        found[work] = []
        for other, (begins, _) in times.items():
            if start <= begins < end and other != work:
                found[work].append(other)
    return found


def step(scene: Scene, model: Any, between: Callable[[], object] = lambda: None) -> None:
    """Run a scene (a training step) with the pipeline `model`.

    With the schedule `GPipe`, call `between` after the forward, before the backward.
    """
    gpipe = scene.schedule == "GPipe"
    run = model.loss if gpipe else model.step
    with torch.set_grad_enabled(scene.grad):
        loss = run(lambda y, _: y.sum(), torch.ones(M, 1), None)
    if gpipe and scene.grad:
        between()
        loss.backward()


def pipeline(scene: Scene, devices: Sequence[Any], engine: Any) -> GPipe:
    """Return a pipeline for a scene (a training step), with one layer for each stage."""
    n = len(make(scene.schedule, N, M).placement)
    return GPipe(
        layers(n),
        [1] * n,
        devices=devices,
        chunks=M,
        checkpoint=scene.mode,
        schedule=scene.schedule,
        engine=engine,
    )


def layers(n: int) -> nn.Sequential:
    """Return n small layers, one for each stage."""
    return nn.Sequential(*[Layer(1, 1) for _ in range(n)])


class Layer(nn.Linear):
    """A linear layer whose forward and backward call the function `inside.call` of their thread.

    An observer sets the function, so that tasks meet while their layers run. If tasks met when they
    begin, a lock that a task takes later, around its layers, would not be found.
    """

    def forward(self, x: Tensor) -> Tensor:
        inside.call()
        output: Tensor = _CallsInBackward.apply(super().forward(x))
        return output


class _CallsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        inside.call()
        return grad


class Inside(threading.local):
    """Holds the function that layers call, one for each thread. By default, it does nothing."""

    call: Callable[[], object] = staticmethod(lambda: None)


inside = Inside()
