"""The guards of one stage in one mini-batch."""

from collections import Counter
from collections.abc import Sequence, Set
from contextlib import AbstractContextManager

from torch import nn

from torchgpipe.task.guards.buffers import Buffers
from torchgpipe.task.guards.gradients import OutputGradients
from torchgpipe.task.guards.in_place import Change, InPlace, InPlaceForRun, Lock
from torchgpipe.task.guards.layers import Layers
from torchgpipe.task.guards.memory import begins_in_place
from torchgpipe.task.guards.parameters import StandInParameters
from torchgpipe.tensors._autograd import refuse_cached_parametrizations, storage_of
from torchgpipe.tensors.observe import NOTHING


class StageGuards:
    """The guards of partition `index`, whose `modules` are given, itself first, and the `lock` of these.

    `recomputed` says whether some task will run the layers twice: only then there are `buffers`, `layers` and
    `gradients`. `outer` are the stand-ins of a run that this one is within.

    Attributes:
        parameters, buffers, layers, gradients: the guards.
        held: the storages of parameters and buffers.
        begins_in_place: whether the first layer changes its input in place.
        kind: what `gradients` depends on, beside a task's inputs; mini-batches of one kind share them.
        of_tasks: what tasks put into the layers one by one.
    """

    buffers: Buffers
    layers: Layers
    gradients: OutputGradients
    kind: tuple[bool, ...]

    def __init__(
        self,
        index: int,
        modules: list[nn.Module],
        lock: Lock,
        *,
        recomputed: bool,
        outer: Set[int] = frozenset(),
    ) -> None:
        refuse_cached_parametrizations()
        self.lock = lock
        self.recomputed = recomputed
        self._index = index
        self.parameters = StandInParameters(modules, outer)
        # All stand-ins, unless a run has them in place from begin to end.
        self.of_tasks: Sequence[Change] = self.parameters.changes
        held = (
            x
            for m in modules
            for d in (m._parameters, m._buffers)
            for x in d.values()
            if x is not None
        )
        self.held = frozenset(map(storage_of, held))
        self.begins_in_place = recomputed and begins_in_place(modules[0])
        if recomputed:
            self.buffers = Buffers(index, modules, self.parameters.ids)
            self.layers = Layers(index, modules)
            self.gradients = OutputGradients()
            self.kind = (*[module.training for module in modules], *self.parameters.needs)

    def in_place(self) -> AbstractContextManager[object]:
        """Put stand-ins into the layers for a task. The caller holds the lock."""
        return InPlace(self.of_tasks) if self.of_tasks else NOTHING

    def after_all_forwards(self) -> None:
        """Raise `RuntimeError` if a layer has replaced, added or frozen a parameter in its forward."""
        with self.lock:
            self.parameters.check_kept(self._index)

    def backward_begins(self, backward: int) -> None:
        """Prepare for `backward`, unless that was done; raise `RuntimeError` if layers or gradients have changed."""
        if self.parameters.begin(backward) and self.recomputed:
            refuse_cached_parametrizations()
            self.layers.backward_begins()
            self.buffers.check_sure()

    def ended(self) -> None:
        """Raise `RuntimeError`, after a whole step, if a buffer has changed in a way that only its content tells."""
        if self.recomputed:
            self.buffers.check_sure()


def stand_ins_for_run(stages: Sequence[StageGuards]) -> InPlaceForRun:
    """Return a context for a run, in which the stand-ins of all these stages are in their layers.

    A layer that several stages have in common cannot serve them all at once: its stand-ins are left to each task.
    """
    times = Counter[int]()
    for guards in stages:
        times.update({id(change.place) for change in guards.parameters.changes})
    parts = []
    for guards in stages:
        changes = guards.parameters.changes
        guards.of_tasks = [change for change in changes if times[id(change.place)] > 1]
        own = [change for change in changes if times[id(change.place)] == 1]
        parts.append((guards.lock, InPlace(own)))
    return InPlaceForRun(parts)
