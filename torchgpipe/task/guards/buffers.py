"""Buffers in two passes: a recomputation finds them as its first pass found them, and changes none a second time.

What goes wrong without it: a layer counts its calls in a buffer, and scales its output by that. The recomputation would
find a later count, and give another gradient; and each mini-batch would be counted twice.

Buffers that may change with every pass (the vectors of spectral norm) are copied before a first pass if they have
changed since the last copy. Their versions do not tell, as kernels (`F.batch_norm`, observers of quantization), `.data`
and NumPy write without counting, so what they hold is compared. A recomputation gets copies of those that have changed
since; only its own thread finds these.

Normalization layers in training update running statistics that their output does not depend on: the second pass leaves
them alone.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from torchgpipe.task.batchnorm import DeferredBatchNorm
from torchgpipe.task.guards.contents import BuffersOfThread, comparable, copied, equal
from torchgpipe.task.guards.in_place import Change, InPlace
from torchgpipe.tensors._autograd import is_compiled, storage_of, within_plain_checkpoint
from torchgpipe.tensors.checkpoint import has_asked, is_recomputing
from torchgpipe.tensors.item import versions
from torchgpipe.tensors.observe import NOTHING

COMPARED = ["cpu", "meta"]
"""The types of devices that compare at once. On others small buffers are copied, instead of waiting for the device, and
large ones compared when the forward is over."""

SMALL = 1 << 16
"""Bytes of a small buffer."""

_STATISTICS = {"running_mean", "running_var", "num_batches_tracked"}
_STATISTICS_ASIDE = {kind.forward for kind in (_BatchNorm, nn.SyncBatchNorm, DeferredBatchNorm)}


class _Slot(NamedTuple):
    """A buffer, or the place for one; its copy, unless it has a stand-in; whether others share its memory."""

    module: nn.Module
    name: str
    tensor: Tensor | None
    version: list[int | None]
    copy: Tensor | None
    shared: bool


class HeldBuffers(NamedTuple):
    """The buffers before a first pass, and those that it has changed in a way that PyTorch counts."""

    slots: tuple[_Slot, ...]
    changed: list[_Slot]


_NONE = HeldBuffers((), [])


class Buffers:
    """The buffers of partition `index` in a mini-batch. Those with stand-ins, whose `ids` are given, need no copies."""

    def __init__(self, index: int, modules: list[nn.Module], ids: set[int]) -> None:
        self._index = index
        self._modules = modules
        self._ids = ids
        # Norms that track statistics, in training: there their output does not depend on the statistics.
        norms = [m for m in modules if m.training and type(m).forward in _STATISTICS_ASIDE]
        self._norms = {
            norm for norm in norms if norm._buffers and norm._buffers.keys() <= _STATISTICS
        }
        self._slots: dict[tuple[nn.Module, str], _Slot] = {}
        self._unsure: dict[tuple[nn.Module, str], _Slot] = {}  # used again, and not compared

    def before_first_pass(self) -> HeldBuffers:
        """Return what the buffers hold now, copied where they have changed. The caller holds the lock."""
        held = [(m, name, x) for m in self._with_buffers() for name, x in m._buffers.items()]
        if not held:
            return _NONE
        changed = {id(x) for m, name, x in held if self._has_changed(m, name, x)}
        if changed:
            storages = {id(x): storage_of(x) for _, _, x in held if x is not None}
            times = Counter[int | None](storages.values())
            stale = {*map(storages.get, changed)}
            # Copies share memory as the buffers do, so those that share it are copied together.
            copies: dict[Any, Any] = {}
            for module, name, x in held:
                storage = storages.get(id(x))
                if storage in stale:
                    shared = times[storage] > 1
                    copy = copied(None if id(x) in self._ids else x, shared, copies)
                    self._slots[module, name] = _Slot(module, name, x, versions((x,)), copy, shared)
        return HeldBuffers(tuple([self._slots[module, name] for module, name, _ in held]), [])

    def after_first_pass(self, held: HeldBuffers) -> None:
        """Note which buffers a first pass has changed."""
        for slot in held.slots:
            now = slot.module._buffers.get(slot.name)
            if now is not slot.tensor or versions((now,)) != slot.version:
                held.changed.append(slot)

    def again(self, held: HeldBuffers) -> AbstractContextManager[object]:
        """Return a context in which the layers find the buffers as they were before the first pass."""
        changed = self._changed_since(held) if held.slots or self._with_buffers() else set()
        return self._put_back(held, changed) if changed or self._norms else NOTHING

    def backward(self) -> AbstractContextManager[object]:
        """Return a context for the layers' backward, in which they may run once more, by `torch.utils.checkpoint`."""
        changes = [
            Change(norm.__dict__, "_buffers", _Unread(norm._buffers)) for norm in self._norms
        ]
        return InPlace(changes) if changes else NOTHING

    def check_sure(self) -> None:
        """Raise `RuntimeError` if a buffer has changed in a way that only its content tells."""
        for (module, name), slot in self._unsure.items():
            if (
                slot.tensor is not None
                and slot.copy is not None
                and not equal(slot.tensor, slot.copy)
            ):
                raise RuntimeError(
                    f"buffer {name!r} of {type(module).__name__} in partition {self._index} was changed by a kernel or "
                    "through .data, which PyTorch does not count, so a recomputation may use another value; change "
                    "it by an operator (copy_), or use checkpoint='never'"
                )

    def _with_buffers(self) -> list[nn.Module]:
        return [module for module in self._modules if module._buffers and module not in self._norms]

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

    def _changed_since(self, held: HeldBuffers) -> set[nn.Module]:
        """Return the modules whose buffers are not what they were in the first pass, or may not be."""
        now = {
            (module, name): x
            for module in self._with_buffers()
            for name, x in module._buffers.items()
        }
        changed = set()
        for slot in held.slots:
            place = slot.module, slot.name
            if place not in now or not _as_held(slot, now.pop(place)):
                changed.add(slot.module)
        return changed | {module for module, _ in now}

    @contextmanager
    def _put_back(self, held: HeldBuffers, changed: set[nn.Module]) -> Iterator[None]:
        own: dict[nn.Module, dict[str, Tensor | None]] = {module: {} for module in changed}
        copies: dict[Any, Any] = {}  # which the layers may change
        for slot in held.slots:
            if slot.module in changed:
                x = copied(slot.copy, slot.shared, copies)
                own[slot.module][slot.name] = slot.tensor if x is None else x
        # Those that the first pass has changed, the second has to change, too.
        expected = [
            (slot, own[slot.module][slot.name]) for slot in held.changed if slot.module in changed
        ]
        before = versions(tuple([x for _, x in expected]))
        changes = [Change(norm.__dict__, "track_running_stats", False) for norm in self._norms]
        compiled = bool(changed) and any(map(is_compiled, self._modules))
        for module, buffers in own.items():
            # torch.compile understands plain dictionaries only.
            view = buffers if compiled else BuffersOfThread(buffers, module._buffers)
            changes.append(Change(module.__dict__, "_buffers", view))
        with self.backward(), InPlace(changes):
            yield
            for (slot, x), version in zip(expected, before, strict=True):
                kept = own[slot.module].get(slot.name) is x and versions((x,)) == [version]
                if kept and not has_asked():
                    raise RuntimeError(
                        f"a layer of partition {self._index} changed buffer {slot.name!r} of "
                        f"{type(slot.module).__name__} in its first pass, and not in the recomputation: it decides by "
                        "something that is no buffer; make that a buffer, ask is_recomputing(), or use "
                        "checkpoint='never'"
                    )


def _as_held(slot: _Slot, now: Tensor | None) -> bool:
    """Return whether a buffer is for sure what it was before a first pass, so that the second may have it as it is."""
    if now is not slot.tensor or versions((now,)) != slot.version:
        return False
    if now is None or slot.copy is None:
        return True
    return now.device.type in COMPARED and bool(equal(now, slot.copy))


class _Unread(dict[str, Any]):
    """The buffers of a batch norm in a recomputation: it normalizes by its input, and needs no statistics.

    And in backward, in which a checkpoint may run it once more, and would save them in place of other tensors.
    """

    def __getitem__(self, name: str) -> Any:
        self._refuse()
        if name == "running_mean" and within_plain_checkpoint("unpack_hook"):
            raise RuntimeError(
                "torch.utils.checkpoint(use_reentrant=False) around a batch norm in training saves other tensors in a "
                "checkpointed task; let the pipeline alone checkpoint, or use checkpoint='never' or use_reentrant=True"
            )
        return super().__getitem__(name)

    def items(self) -> Any:
        self._refuse()
        return super().items()

    def __reduce__(self) -> Any:
        return dict, (dict(self.items()),)

    def _refuse(self) -> None:
        if is_recomputing():  # another thread may look at the layers meanwhile
            raise RuntimeError(
                "a layer uses the running statistics of a batch norm in training, which have changed since the first "
                "pass of a checkpointed task; use checkpoint='never', or keep the norm in evaluation mode"
            )
