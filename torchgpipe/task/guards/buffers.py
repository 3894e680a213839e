"""Buffers in two passes: the second finds them as the first has found them, and changes none again.

What goes wrong without it: a layer counts its calls in a buffer, and scales its output by that. The
recomputation would find a later count, and give another gradient; and each mini-batch would be
counted twice.

Buffers that may change with every pass (the vectors of spectral norm) are copied before a first
pass if they have changed since the last copy. Their versions do not tell, as kernels
(`F.batch_norm`, observers of quantization), `.data` and NumPy write without counting, so what they
hold is compared. A recomputation gets copies of those that have changed since; only its own thread
finds these. Buffers of a stage that has none cost one look at each module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.jit import ScriptModule

from torchgpipe.task.guards.contents import BuffersOfThread, comparable, copied, equal
from torchgpipe.task.guards.guard import Context, Guard, GuardedTask
from torchgpipe.task.guards.in_place import Change, InPlace
from torchgpipe.tensors._autograd import is_compiled, storage_of
from torchgpipe.tensors.checkpoint import has_asked
from torchgpipe.tensors.item import versions

COMPARED = ["cpu", "meta"]
"""The types of devices that compare at once.

On others small buffers are copied, instead of waiting for the device, and large ones are compared
when the forward is over.
"""

SMALL = 1 << 16
"""Bytes of a small buffer."""

Place = tuple[nn.Module, str]
"""A module, and the name of one of its buffers."""


class _Slot(NamedTuple):
    """A buffer, or the place for one, before a first pass."""

    module: nn.Module
    name: str
    tensor: Tensor | None
    version: list[int | None]
    copy: Tensor | None  # `None` of a buffer that has a stand-in
    shared: bool  # whether other buffers share its memory


class HeldBuffers(NamedTuple):
    """The buffers before a first pass, and those that it has changed as PyTorch counts."""

    slots: list[_Slot]
    changed: list[_Slot]


class Buffers(Guard):
    """The buffers of partition `index`, but not those of its `norms` (statistics.py).

    Buffers with stand-ins, whose `ids` are given, need no copies. Scripted modules have none here:
    others are refused (parameters.py).
    """

    def __init__(
        self, index: int, modules: list[nn.Module], norms: Set[nn.Module], ids: set[int]
    ) -> None:
        self._index = index
        self._modules = [m for m in modules if m not in norms and not isinstance(m, ScriptModule)]
        self._ids = ids
        self._slots: dict[Place, _Slot] = {}  # the latest of each buffer
        self._unsure: dict[Place, _Slot] = {}  # of buffers that were not compared

    def before_first_pass(self, task: GuardedTask) -> None:
        """Note what the buffers hold now, copied where they have changed."""
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
        """Copy the buffers that have changed, and those that share memory with them."""
        storages = {id(x): storage_of(x) for x in places.values() if x is not None}
        times = Counter[int | None](storages.values())
        stale = {storages.get(id(x)) for x in changed}
        # Copies share memory as the buffers do, so those that share it are copied together.
        copies: dict[Any, Any] = {}
        for (module, name), x in places.items():
            storage = storages.get(id(x))
            if storage in stale:
                shared = times[storage] > 1
                copy = None if id(x) in self._ids else copied(x, shared, copies)
                self._slots[module, name] = _Slot(module, name, x, versions((x,)), copy, shared)

    def after_first_pass(self, task: GuardedTask, outputs: object) -> None:
        """Note which buffers a first pass has changed."""
        held: HeldBuffers = task.noted[self]
        for slot in held.slots:
            now = slot.module._buffers.get(slot.name)
            if now is not slot.tensor or versions((now,)) != slot.version:
                held.changed.append(slot)

    def before_recomputation(self, task: GuardedTask) -> Context | None:
        """Let the layers find the buffers as they were before the first pass."""
        held: HeldBuffers = task.noted[self]
        changed = set()  # modules whose buffers are not as in the first pass, or may not be
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

    def backward_begins(self) -> None:
        """Raise `RuntimeError` if a buffer has changed without a count by PyTorch."""
        for (module, name), slot in self._unsure.items():
            if slot.tensor is None or slot.copy is None or equal(slot.tensor, slot.copy):
                continue
            raise RuntimeError(
                f"buffer {name!r} of {type(module).__name__} in partition {self._index} was "
                "changed by a kernel or through .data, which PyTorch does not count, so a "
                "recomputation may use another value; change it by an operator (copy_), or use "
                "checkpoint='never'"
            )

    def ended(self) -> None:
        """Raise `RuntimeError` for the same reason, after a whole step."""
        self.backward_begins()

    def _has_changed(self, module: nn.Module, name: str, buffer: Tensor | None) -> bool:
        """Return whether the buffer has changed since its last copy, or there is none."""
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
        copies: dict[Any, Any] = {}  # which the layers may change
        for slot in held.slots:
            if slot.module in changed:
                x = copied(slot.copy, slot.shared, copies)
                own[slot.module][slot.name] = slot.tensor if x is None else x
        # The second pass has to change the buffers that the first has changed.
        expected = []
        for slot in held.changed:
            if slot.module in changed:
                x = own[slot.module][slot.name]
                expected.append((slot, x, versions((x,))))
        changes = []
        # torch.compile understands plain dictionaries only.
        compiled = any(is_compiled(module) for module in self._modules)
        for module, buffers in own.items():
            view = buffers if compiled else BuffersOfThread(buffers, module._buffers)
            changes.append(Change(module.__dict__, "_buffers", view))
        with InPlace(changes):
            yield
            for slot, x, version in expected:
                kept = own[slot.module].get(slot.name) is x and versions((x,)) == version
                if kept and not has_asked():
                    raise RuntimeError(
                        f"a layer of partition {self._index} changed buffer {slot.name!r} of "
                        f"{type(slot.module).__name__} in its first pass, and not in the "
                        "recomputation: it decides by something that is no buffer; make that a "
                        "buffer, ask is_recomputing(), or use checkpoint='never'"
                    )


def _as_held(slot: _Slot, now: Tensor | None) -> bool:
    """Return whether a buffer is for sure what it was before a first pass.

    Then the second pass may have it as it is.
    """
    if now is not slot.tensor or versions((now,)) != slot.version:
        return False
    if now is None or slot.copy is None:
        return True
    return now.device.type in COMPARED and bool(equal(now, slot.copy))
