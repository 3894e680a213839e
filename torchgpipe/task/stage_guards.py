"""The guards of one stage in one mini-batch, and the order in which they are called.

A task is a micro-batch on a stage. A guard makes sure of one thing for the tasks of a stage: for
example, that a recomputation finds the same buffers as the forward (guards/guard.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from functools import cache
from typing import Any

import torch
from torch import nn

from torchgpipe.modules import Swap, Swapped
from torchgpipe.task.batchnorm import norms_in_training
from torchgpipe.task.guards.attention import SlowAttention
from torchgpipe.task.guards.buffers import Buffers
from torchgpipe.task.guards.cast_cache import WithoutCastCache
from torchgpipe.task.guards.gradients import OutputGradients
from torchgpipe.task.guards.guard import Before, Context, Guard, GuardedTask, Nested
from torchgpipe.task.guards.inputs import KeptInputs
from torchgpipe.task.guards.layers import UnchangedLayers
from torchgpipe.task.guards.modes import AmbientModes
from torchgpipe.task.guards.parameters import StandInParameters
from torchgpipe.task.guards.stand_ins import StandInsForRun, StandInsForTask
from torchgpipe.task.guards.stateful import StatefulModes
from torchgpipe.task.guards.statistics import Statistics
from torchgpipe.task.stage import Stage
from torchgpipe.task.turns import Lock
from torchgpipe.tensors._autograd import refuse_cached_parametrizations, storage_of
from torchgpipe.tensors.microbatch import Flat
from torchgpipe.tensors.observe import NOTHING

_DROPOUT_OF_CUDNN = (
    "{} has dropout={}, whose masks cuDNN draws on a GPU from a state of its own, so that a "
    "recomputation would draw other masks; use checkpoint='never', or several layers with an "
    "nn.Dropout between them"
)


class StageGuards:
    """The guards of a stage in one mini-batch, which keep its tasks' recomputations correct.

    Each guard keeps one thing, such as the buffers, equal in a task's forward and recomputation.
    Without recomputations, only the guard of the parameters is needed. The guard of the random
    numbers is not in this object, because each task has such a guard of its own.

    Args:
        stage: The stage.
        ambient: The modes (such as autocast) that are active in the caller's code.
        recomputes: Whether some tasks are recomputed, so that they run the layers twice.
        outer: The ids of stand-ins (detached parameters that tasks use) of an outer run. An outer
            run is another mini-batch, in which a layer or a hook has called this pipeline.

    Attributes:
        index: The index of the stage.
        parameters: The guard of the parameters.
        inputs: The guard of the tasks' inputs; only if some tasks are recomputed.
        gradients: The guard that finds out which outputs require grad; only if some tasks are
            recomputed.
        held: Numbers that identify the storages of the stage's parameters and buffers, to find
            outputs that share memory with them.
    """

    inputs: KeptInputs
    gradients: OutputGradients

    def __init__(
        self,
        stage: Stage,
        ambient: AmbientModes,
        *,
        recomputes: bool,
        outer: Set[int] = frozenset(),
    ) -> None:
        self.index = stage.index
        self.lock: Lock = stage.lock
        self.ambient = ambient
        self._recomputes = recomputes
        # The keys are names of methods, such as "before_first_pass". The value of a key is a list
        # with this method of each guard that overrides it, the outermost guard first.
        self._at: dict[str, list[Callable[..., Any]]] = {moment: [] for moment in _MOMENTS}
        with self.lock:
            refuse_cached_parametrizations()
            self.parameters = StandInParameters(stage.index, stage.modules, outer, stage.away)
            self.held = _storages(stage.modules)
            self.add(self.parameters)
            if recomputes:
                self._add_for_recomputations(stage)

    def _add_for_recomputations(self, stage: Stage) -> None:
        index, modules, ambient = stage.index, stage.modules, self.ambient
        if stage.runs_later:
            _refuse_dropout_of_cudnn(modules)
        # Compiled code always reads and updates the running statistics of batch norms. So if layers
        # are compiled, the guard `Buffers` restores these statistics like all other buffers.
        norms = set[nn.Module]() if stage.compiled else norms_in_training(modules)
        self.inputs = KeptInputs(index, stage.partition)
        # Which outputs require grad depends on this, and on which inputs require grad.
        modes = [getattr(module, "training", False) for module in modules]
        kind = (*modes, *self.parameters.needs)
        self.gradients = OutputGradients(
            stage.first_tasks(() if stage.compiled else kind),
            self.parameters.ids,
            self.inputs.begins_in_place,
            modes=(*kind, ambient.casts) if stage.compiled else None,
            all_compiled=stage.all_compiled,
        )
        self.add(self.inputs)
        self.add(ambient)
        if stage.compiled and ambient.casts:
            self.add(WithoutCastCache())
        if ambient.watched:
            self.add(StatefulModes(index, ambient))
        if stage.attends:
            self.add(SlowAttention())
        self.add(self.gradients)
        self.add(UnchangedLayers(index, modules))
        self.add(Buffers(index, modules, norms, self.parameters))
        if norms:
            self.add(Statistics(norms))

    def add(self, guard: Guard) -> None:
        """Add a guard, whose methods are called after those of all guards that were added before.

        Contexts that its methods return are entered inside of the contexts of those earlier guards.
        """
        kind: Any = type(guard)
        for moment in _moments_of(kind):
            self._at[moment].append(getattr(guard, moment))

    def around(self, moment: Before, task: GuardedTask) -> Context:
        """Call the method `moment` of all guards; return a context in which the layers have to run.

        Args:
            moment: The name of the method, such as "before_first_pass". It says whether a forward,
                a recomputation or a backward of the task comes next.
            task: The task.
        """
        contexts = []
        for before in (*self._at[moment], getattr(task.randomness, moment)):
            context = before(task)
            if context is not None:
                contexts.append(context)
        if not contexts:
            return NOTHING
        return contexts[0] if len(contexts) == 1 else Nested(contexts)

    def after_first_pass(self, task: GuardedTask, outputs: Flat) -> None:
        """Call all guards after the forward of a checkpointed task.

        The guards check what the layers did, and record values for the recomputation.

        Args:
            task: The task.
            outputs: The outputs of the layers.
        """
        for after in self._at["after_first_pass"]:
            after(task, outputs)
        task.randomness.after_first_pass(task, outputs)

    def after_recomputation(self, task: GuardedTask, outputs: Flat) -> None:
        """Let all guards check that a task's recomputation did the same as its forward."""
        for after in self._at["after_recomputation"]:
            after(task, outputs)

    def after_all_forwards(self) -> None:
        """Raise `RuntimeError` if a layer has replaced, added or frozen a parameter in its forward.

        A pipeline does not support such changes, because tasks use stand-ins (detached parameters).
        """
        with self.lock:
            for check in self._at["after_all_forwards"]:
                check()

    def backward_begins(self, backward: int) -> None:
        """Let all guards check the stage before the first task of a backward.

        Args:
            backward: The number of the backward. All tasks of the stage call this method with the
                same number, but only the first call does anything.

        Raises:
            RuntimeError: If layers or gradients have changed since the forward.
        """
        if self.parameters.begin(backward) and self._recomputes:
            refuse_cached_parametrizations()
            for check in self._at["backward_begins"]:
                check()

    def ended(self) -> None:
        """Let all guards check the stage at the end of a step; a failed check raises an error."""
        for check in self._at["ended"]:
            check()


_MOMENTS = [moment for moment in vars(Guard) if not moment.startswith("_")]


@cache
def _moments_of(kind: Any) -> list[str]:
    """Return the names of the methods that a guard's class overrides; only these are called."""
    return [moment for moment in _MOMENTS if getattr(kind, moment) is not getattr(Guard, moment)]


def _storages(modules: Sequence[nn.Module]) -> frozenset[int]:
    """Return numbers that identify the storages of the modules' parameters and buffers."""
    found = set()
    for module in modules:
        for tensors in (module._parameters, module._buffers):
            for x in tensors.values():
                if x is not None:
                    found.add(storage_of(x))
    return frozenset(found)


def stand_ins_for_run(all_guards: Sequence[StageGuards]) -> StandInsForRun:
    """Return a context that replaces the layers' parameters by stand-ins during a whole run.

    A stand-in is a detached parameter that tasks use in place of the parameter. If several stages
    share a layer, each stage has its own stand-in for the same parameter. So these parameters are
    replaced only while a task runs, by the stand-ins of the task's stage.
    """
    times = Counter[int]()
    for guards in all_guards:
        times.update({id(each.place) for each in guards.parameters.swaps})
    parts = []
    for guards in all_guards:
        own: list[Swap] = []
        common: list[Swap] = []
        for each in guards.parameters.swaps:
            (own if times[id(each.place)] == 1 else common).append(each)
        if common:
            guards.add(StandInsForTask(common))
        parts.append((guards.lock, Swapped(own)))
    return StandInsForRun(parts)


def _refuse_dropout_of_cudnn(modules: Iterable[nn.Module]) -> None:
    """Raise `RuntimeError` if an LSTM, GRU or RNN on a GPU has dropout and is to be recomputed."""
    for module in modules:
        if not isinstance(module, nn.RNNBase) or not torch.backends.cudnn.enabled:
            continue
        # The dropout is between layers of the module, so a single layer has none.
        if module.dropout and module.num_layers > 1 and module.training:
            raise RuntimeError(_DROPOUT_OF_CUDNN.format(type(module).__name__, module.dropout))
