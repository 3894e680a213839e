"""The guards of one stage in one mini-batch, and how they nest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence, Set
from functools import cache
from typing import Any

from torch import nn

from torchgpipe.task.guards.attention import SlowAttention
from torchgpipe.task.guards.buffers import Buffers
from torchgpipe.task.guards.gradients import OutputGradients
from torchgpipe.task.guards.guard import Before, Context, Guard, GuardedTask, Nested
from torchgpipe.task.guards.in_place import Change, InPlace, InPlaceForRun, InPlaceForTask, Lock
from torchgpipe.task.guards.layers import Layers
from torchgpipe.task.guards.memory import KeptInputs
from torchgpipe.task.guards.modes import AmbientModes
from torchgpipe.task.guards.parameters import StandInParameters
from torchgpipe.task.guards.stateful import StatefulModes
from torchgpipe.task.guards.statistics import Statistics, norms_in_training
from torchgpipe.task.stage import Stage
from torchgpipe.tensors._autograd import refuse_cached_parametrizations, storage_of
from torchgpipe.tensors.microbatch import Flat
from torchgpipe.tensors.observe import NOTHING


class StageGuards:
    """The guards that a stage needs in a mini-batch that begins.

    Where nothing is recomputed, these are its parameters, and the random numbers of each task.

    Args:
        stage: The stage.
        ambient: The modes around the caller's code.
        recomputed: Whether some task will run the layers twice.
        outer: The stand-ins of a run that this one is within, by their ids.

    Attributes:
        index: The index of the stage.
        parameters, memory, gradients: The guards of these names; the last two only if something is
            recomputed.
        held: The storages of parameters and buffers. kind: What `gradients` depends on, beside a
        task's inputs; mini-batches of one kind share it.
    """

    memory: KeptInputs
    gradients: OutputGradients

    def __init__(
        self,
        stage: Stage,
        ambient: AmbientModes,
        *,
        recomputed: bool,
        outer: Set[int] = frozenset(),
    ) -> None:
        self.index = stage.index
        self.lock: Lock = stage.lock
        self.ambient = ambient
        self._recomputed = recomputed
        # By moment: what guards have to do then, from the outermost guard to the innermost.
        self._at: dict[str, list[Callable[..., Any]]] = {moment: [] for moment in _MOMENTS}
        with self.lock:
            refuse_cached_parametrizations()
            self.parameters = StandInParameters(stage.index, stage.modules, outer)
            self.held = _storages(stage.modules)
            self.add(self.parameters)
            if recomputed:
                self._add_for_recomputations(stage)

    def _add_for_recomputations(self, stage: Stage) -> None:
        index, modules, ambient = stage.index, stage.modules, self.ambient
        norms = norms_in_training(modules)
        self.memory = KeptInputs(index, stage.partition)
        # What is known of tasks depends on this, beside which of their inputs take a gradient.
        kind = (*[module.training for module in modules], *self.parameters.needs)
        self.gradients = OutputGradients(
            stage.gradients_of(kind), self.parameters.ids, self.memory.begins_in_place
        )
        self.add(self.memory)
        self.add(ambient)
        if ambient.watched:
            self.add(StatefulModes(index, ambient))
        if stage.attends:
            self.add(SlowAttention())
        self.add(self.gradients)
        self.add(Layers(index, modules))
        self.add(Buffers(index, modules, norms, self.parameters.ids))
        if norms:
            self.add(Statistics(norms))

    def add(self, guard: Guard) -> None:
        """Add a guard within the others: it is told last, and its contexts are the innermost."""
        kind: Any = type(guard)
        for moment in _moments_of(kind):
            self._at[moment].append(getattr(guard, moment))

    def around(self, moment: Before, task: GuardedTask) -> Context:
        """Let the guards prepare for a pass, or a backward; return the contexts that it needs."""
        contexts = []
        for before in (*self._at[moment], getattr(task.randomness, moment)):
            context = before(task)
            if context is not None:
                contexts.append(context)
        if not contexts:
            return NOTHING
        return contexts[0] if len(contexts) == 1 else Nested(contexts)

    def after_first_pass(self, task: GuardedTask, outputs: Flat) -> None:
        """Let the guards check a first pass, and note what the recomputation needs."""
        for after in self._at["after_first_pass"]:
            after(task, outputs)
        task.randomness.after_first_pass(task, outputs)

    def after_recomputation(self, task: GuardedTask, outputs: Flat) -> None:
        """Let the guards check that a recomputation has done the same."""
        for after in self._at["after_recomputation"]:
            after(task, outputs)

    def after_all_forwards(self) -> None:
        """Raise `RuntimeError` if a layer has replaced, added or frozen a parameter."""
        with self.lock:
            for check in self._at["after_all_forwards"]:
                check()

    def backward_begins(self, backward: int) -> None:
        """Prepare for the backward of this number, unless that was done.

        Raise `RuntimeError` if layers or gradients have changed.
        """
        if self.parameters.begin(backward) and self._recomputed:
            refuse_cached_parametrizations()
            for check in self._at["backward_begins"]:
                check()

    def ended(self) -> None:
        """Raise `RuntimeError`, after a whole step, if something is not as it has to be."""
        for check in self._at["ended"]:
            check()


_MOMENTS = [moment for moment in vars(Guard) if not moment.startswith("_")]


@cache
def _moments_of(kind: Any) -> list[str]:
    """Return the moments at which guards of a class have something to do."""
    return [moment for moment in _MOMENTS if getattr(kind, moment) is not getattr(Guard, moment)]


def _storages(modules: Sequence[nn.Module]) -> frozenset[int]:
    """Return the storages of the parameters and buffers of modules."""
    found = set()
    for module in modules:
        for tensors in (module._parameters, module._buffers):
            for x in tensors.values():
                if x is not None:
                    found.add(storage_of(x))
    return frozenset(found)


def stand_ins_for_run(stages: Sequence[StageGuards]) -> InPlaceForRun:
    """Return a context for a run, in which the stand-ins of all these stages are in their layers.

    A layer that several stages have in common cannot serve them all at once: its stand-ins are left
    to each task.
    """
    times = Counter[int]()
    for guards in stages:
        times.update({id(change.place) for change in guards.parameters.changes})
    parts = []
    for guards in stages:
        own: list[Change] = []
        common: list[Change] = []
        for change in guards.parameters.changes:
            (own if times[id(change.place)] == 1 else common).append(change)
        if common:
            guards.add(InPlaceForTask(common))
        parts.append((guards.lock, InPlace(own)))
    return InPlaceForRun(parts)
