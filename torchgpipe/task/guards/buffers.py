"""Give a task's recomputation the buffers that its forward had, and protect the real buffers.

What goes wrong without this guard: a layer counts its calls in a buffer, and scales its output by
the count. The recomputation would find a larger count than the forward, and would compute another
output. It would also increase the count a second time.

Before a task's forward, the guard copies each buffer that has changed since its last copy. To find
out which buffers have changed, version counters are not enough. Some kernels (`F.batch_norm`,
observers of quantization), `.data` and NumPy change a buffer, but not its version counter. So the
guard also compares values.

In a recomputation, the layers get copies of the buffers that have changed since the forward. Only
the thread that recomputes sees these copies.

What it costs: a copy of each buffer that tasks change, for each task that changes it. Before each
first pass and each recomputation, each buffer is compared with its copy. On a GPU, buffers of up to
64 KiB are copied before each first pass instead, and larger ones are compared once when the
backward begins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.jit import ScriptModule

from torchgpipe.modules import Swap, Swapped
from torchgpipe.task.guards.guard import Context, Guard, GuardedTask
from torchgpipe.task.guards.parameters import StandInParameters
from torchgpipe.tensors._autograd import is_compiled, storage_of
from torchgpipe.tensors.checkpoint import has_asked
from torchgpipe.tensors.contents import BuffersOfThread, comparable, copied, equal
from torchgpipe.tensors.item import versions

COMPARED = ["cpu", "meta"]
"""The types of devices whose buffers are compared immediately.

On other devices, a comparison would wait for the device. There small buffers are always copied, and
large buffers are compared after the forward.
"""

SMALL = 1 << 16
"""The largest number of bytes of a small buffer."""

Place = tuple[nn.Module, str]
"""A module, and the name of one of its buffers."""


class _Slot(NamedTuple):
    """A buffer as it was before a task's forward.

    Attributes:
        module: The module that has the buffer.
        name: The name of the buffer in the module.
        tensor: The buffer.
        version: A list of one number: the value of the buffer's version counter.
        copy: A copy of the buffer, or `None` if the buffer needs no copy.
        shared: Whether other buffers share memory with the buffer.
    """

    module: nn.Module
    name: str
    tensor: Tensor | None
    version: list[int | None]
    copy: Tensor | None
    shared: bool


class HeldBuffers(NamedTuple):
    """What the guard `Buffers` records about the buffers in a task's forward.

    Attributes:
        slots: All buffers as they were before the forward.
        changed: The buffers that the forward has replaced, or whose version counter it has changed.
    """

    slots: list[_Slot]
    changed: list[_Slot]


class Buffers(Guard):
    """The guard that gives a task's recomputation the buffers that its forward had.

    Without it, a layer that counts its calls in a buffer, for example, would compute another output
    in the recomputation than in the forward.

    Three kinds of buffers are not copied. Running statistics of batch norms in training mode have
    their own guard (statistics.py). Scripted modules with buffers raise an error (parameters.py).
    For a buffer that requires grad, tasks use a stand-in (a detached tensor), like for a parameter.

    Args:
        index: The index of the partition.
        modules: The modules of the partition.
        norms: The batch norms in training mode.
        parameters: The guard that makes stand-ins for parameters, and for buffers that require
            grad.
    """

    def __init__(
        self,
        index: int,
        modules: list[nn.Module],
        norms: Set[nn.Module],
        parameters: StandInParameters,
    ) -> None:
        self._index = index
        self._modules = [m for m in modules if m not in norms and not isinstance(m, ScriptModule)]
        self._parameters = parameters
        self._slots: dict[Place, _Slot] = {}  # the latest record of each buffer, with its copy
        self._unsure: dict[Place, _Slot] = {}  # the buffers that `backward_begins` compares

    def before_first_pass(self, task: GuardedTask) -> None:
        """Record the buffers, and copy each buffer that has changed since its last copy."""
        task.noted[self] = held = HeldBuffers([], [])
        places: dict[Place, Tensor | None] = {}
        changed = []
        for module in self._modules:
            for name, x in module._buffers.items():
                places[module, name] = x
                if self._has_changed(module, name, x):
                    changed.append(x)
        if changed:
            self._copy(places, changed)
        for place in places:
            held.slots.append(self._slots[place])

    def _copy(self, places: dict[Place, Tensor | None], changed: Sequence[Tensor | None]) -> None:
        """Copy the `changed` buffers, and all buffers that share memory with a changed buffer."""
        storages = {id(x): storage_of(x) for x in places.values() if x is not None}
        times = Counter[int | None](storages.values())
        stale = {storages.get(id(x)) for x in changed}
        # If two buffers share memory, their copies do, too. So they are copied together.
        copies: dict[Any, Any] = {}
        for (module, name), x in places.items():
            storage = storages.get(id(x))
            if storage in stale:
                shared = times[storage] > 1
                stands = id(x) in self._parameters.ids
                copy = None if stands else copied(x, shared, copies)
                self._slots[module, name] = _Slot(module, name, x, versions((x,)), copy, shared)

    def after_first_pass(self, task: GuardedTask, outputs: object) -> None:
        """Record which buffers the layers have changed in the task's forward."""
        held: HeldBuffers = task.noted[self]
        for slot in held.slots:
            now = slot.module._buffers.get(slot.name)
            if now is not slot.tensor or versions((now,)) != slot.version:
                held.changed.append(slot)

    def before_recomputation(self, task: GuardedTask) -> Context | None:
        """Return a context that gives the buffers the values from before the task's forward.

        If the buffers still have these values, return None.
        """
        held: HeldBuffers = task.noted[self]
        changed = set()  # modules whose buffers may differ from those before the first pass
        known = set()
        for slot in held.slots:
            known.add((slot.module, slot.name))
            buffers = slot.module._buffers
            if slot.name not in buffers or not _as_held(slot, buffers[slot.name]):
                changed.add(slot.module)
        for module in self._modules:
            for name in module._buffers:
                if (module, name) not in known:
                    changed.add(module)
        return self._put_back(held, changed) if changed else None

    def _used(self, buffer: Tensor | None) -> Tensor | None:
        """Return the tensor that tasks use for a buffer: its stand-in, or else the buffer itself.

        A buffer has a stand-in (a detached tensor) if it requires grad.
        """
        return None if buffer is None else self._parameters.by_parameter.get(buffer, buffer)

    def backward_begins(self) -> None:
        """Raise `RuntimeError` if a buffer's values have changed, but not its version counter.

        This method compares only large buffers that are not on the CPU. Each forward has compared
        or copied all other buffers before it began.
        """
        for (module, name), slot in self._unsure.items():
            if slot.tensor is None or slot.copy is None or equal(slot.tensor, slot.copy):
                continue
            raise RuntimeError(
                f"buffer {name!r} of {type(module).__name__} in partition {self._index} was "
                "changed by a kernel or through .data, which PyTorch does not count in the "
                "version counter, so a recomputation may use another value; change it by an "
                "operator such as copy_, or use checkpoint='never'"
            )

    def ended(self) -> None:
        """At the end of a step, check once more that no buffer has changed unnoticed."""
        self.backward_begins()

    def _has_changed(self, module: nn.Module, name: str, buffer: Tensor | None) -> bool:
        """Return whether a buffer must be copied: it is new, or has changed since its last copy.

        For a large buffer on a GPU, the result is false before a forward, and its values are
        compared when the backward begins. To compare them before each forward, the CPU would have
        to wait for the GPU.
        """
        slot = self._slots.get((module, name))
        if slot is None or slot.tensor is not buffer or versions((buffer,)) != slot.version:
            return True
        if buffer is None or slot.copy is None:
            return False
        if buffer.device.type in COMPARED or not comparable(buffer):
            return not equal(buffer, slot.copy)
        if buffer.nbytes <= SMALL:
            return True
        self._unsure[module, name] = slot
        return False

    @contextmanager
    def _put_back(self, held: HeldBuffers, changed: set[nn.Module]) -> Iterator[None]:
        own: dict[nn.Module, dict[str, Tensor | None]] = {module: {} for module in changed}
        copies: dict[Any, Any] = {}  # the layers may change these
        for slot in held.slots:
            if slot.module in changed:
                x = copied(slot.copy, slot.shared, copies)
                own[slot.module][slot.name] = self._used(slot.tensor) if x is None else x
        # The recomputation has to change the same buffers as the first pass.
        expected = []
        for slot in held.changed:
            if slot.module in changed:
                x = own[slot.module][slot.name]
                expected.append((slot, x, versions((x,))))
        swaps = []
        # torch.compile understands plain dictionaries only.
        compiled = any(is_compiled(module) for module in self._modules)
        for module, buffers in own.items():
            view = buffers if compiled else BuffersOfThread(buffers, module._buffers)
            swaps.append(Swap(module.__dict__, "_buffers", view))
        with Swapped(swaps):
            yield
            for slot, x, version in expected:
                kept = own[slot.module].get(slot.name) is x and versions((x,)) == version
                if kept and not has_asked():
                    raise RuntimeError(
                        f"a layer of partition {self._index} changed buffer {slot.name!r} of "
                        f"{type(slot.module).__name__} in its first pass, but not in the "
                        "recomputation: the change depends on a value that is not a buffer; make "
                        "that value a buffer, let the layer call is_recomputing() to decide, or "
                        "use checkpoint='never'"
                    )


def _as_held(slot: _Slot, now: Tensor | None) -> bool:
    """Return whether a buffer certainly has the same values as before the task's forward.

    If so, the recomputation can use the buffer itself, and needs no copy.

    Args:
        slot: The record of the buffer before the forward.
        now: The buffer that the module has now.
    """
    if now is not slot.tensor or versions((now,)) != slot.version:
        return False
    if now is None or slot.copy is None:
        return True
    return now.device.type in COMPARED and bool(equal(now, slot.copy))
