"""What a partition's layers hold when a mini-batch begins, so that a recomputation meets what the first pass met.

A recomputation runs the layers again, perhaps long after their first pass. Meanwhile a layer may have been replaced, a
parameter updated, or the model been set to evaluation. What can be put back for the second pass is put back:
parameters, buffers, training mode. For the rest there is an error: recomputed activations must never be silently
others.

Buffers need three rules. Normalization layers in training update running statistics that their output does not depend
on: the second pass leaves them alone. Other small buffers may change with every pass (the vectors of spectral norm):
they are copied before a first pass if they have changed since the last copy. Large ones must not change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from torchgpipe.batchnorm import DeferredBatchNorm
from torchgpipe.observe import NOTHING
from torchgpipe.parameters import InPlace, Leaves, Lock

__all__ = ["Contents", "modules_of"]

SMALL = 1 << 16
"""Bytes up to which a buffer is copied."""


class _Slot(NamedTuple):
    """A buffer, with the number of in-place changes that it has seen; and its copy, if it is small."""

    module: nn.Module
    name: str
    tensor: Tensor
    version: int
    copy: Tensor | None

    def is_as_before(self) -> bool:
        return self.module._buffers.get(self.name) is self.tensor and _version(self.tensor) == self.version

    def copied_again(self) -> _Slot:
        present = self.module._buffers.get(self.name)
        return self if present is None else _slot(self.module, self.name, present)


Copies = tuple[_Slot, ...]

_NO_BUFFERS: nullcontext[Copies] = nullcontext(())


class Contents:
    """What the layers of partition `index` hold now. `recomputed`: whether some task will run them twice.

    Attributes:
        modules: all of the partition's modules.
        leaves: what tasks use in place of the parameters.
        begins_in_place: whether the first layer changes its input in place, by its own account (`inplace`).
    """

    def __init__(self, index: int, partition: nn.Module, lock: Lock, *, recomputed: bool) -> None:
        self.modules = modules_of(partition)
        self.leaves = Leaves(self.modules, lock)
        self.begins_in_place = False
        self._index = index
        self._partition = partition
        self._lock = lock
        if recomputed:
            self.begins_in_place = _begins_in_place(partition)
            self._modes = [module.training for module in self.modules]
            holders = [module for module in self.modules if module._buffers]
            self._norms = [module for module in holders if _updates(module)]
            slots = [
                _slot(module, name, buffer)
                for module in holders
                if not _updates(module)
                for name, buffer in module._buffers.items()
                if buffer is not None
            ]
            self._constant = [slot for slot in slots if slot.copy is None]
            self._copies = tuple(slot for slot in slots if slot.copy is not None)

    def check_structure(self) -> None:
        """Raise `RuntimeError` if the partition does not consist of the same modules any more."""
        if modules_of(self._partition) != self.modules:
            raise RuntimeError(
                f"a layer of partition {self._index} was replaced, added or removed between forward and backward, so a "
                "checkpointed task cannot be recomputed; change layers between steps only"
            )

    def first_pass(self) -> AbstractContextManager[Copies]:
        """Run the first pass of a checkpointed task within this; it gives the small buffers as they are before.

        Raises:
            RuntimeError: the pass has changed a large buffer.
        """
        return self._watched() if self._constant or self._copies else _NO_BUFFERS

    def second_pass(self, copies: Copies) -> AbstractContextManager[object]:
        """Run a recomputation within this: the layers hold what they held in the first pass, then the present again.

        Raises:
            RuntimeError: something has changed that cannot be put back.
        """
        self.leaves.check_unchanged(self._index)
        as_it_is = [module.training for module in self.modules] == self._modes
        return NOTHING if as_it_is and not (self._norms or copies or self._constant) else self._put_back(copies)

    @contextmanager
    def _watched(self) -> Iterator[Copies]:
        with self._lock:
            if not all(slot.is_as_before() for slot in self._copies):
                self._copies = tuple(slot if slot.is_as_before() else slot.copied_again() for slot in self._copies)
            yield self._copies
            for slot in self._constant:
                if not slot.is_as_before():
                    raise RuntimeError(
                        f"{self._describe(slot)} was changed in forward, so recomputing a checkpointed task would "
                        f"start from another value (buffers up to {SMALL} bytes are copied, this one has "
                        f"{slot.tensor.nbytes}); use checkpoint='never', or do not change it in training"
                    )

    @contextmanager
    def _put_back(self, copies: Copies) -> Iterator[None]:
        for slot in self._constant:
            if _version(slot.tensor) != slot.version:
                raise RuntimeError(
                    f"{self._describe(slot)} was changed in place between forward and backward, so the recomputation "
                    "of a checkpointed task would use other values; change it after backward()"
                )
        present = [(module.training, module.__dict__.get("track_running_stats")) for module in self.modules]
        buffers = self._buffers(copies)
        try:
            for module, mode in zip(self.modules, self._modes, strict=True):
                module.__dict__["training"] = mode
            for norm in self._norms:
                norm.__dict__["track_running_stats"] = False
            with InPlace(self._lock, "_buffers", [m.__dict__ for m in buffers], [*buffers.values()]):
                yield
        finally:
            for module, (mode, tracks) in zip(self.modules, present, strict=True):
                module.__dict__["training"] = mode
                if tracks is not None:
                    module.__dict__["track_running_stats"] = tracks

    def _buffers(self, copies: Copies) -> dict[nn.Module, dict[str, Tensor | None]]:
        """Return all buffers of the first pass, by module; of small ones fresh copies, which a pass may change."""
        found: dict[nn.Module, dict[str, Tensor | None]] = {}
        for slot in (*self._constant, *copies):
            buffers = found.setdefault(slot.module, dict(slot.module._buffers))
            buffers[slot.name] = slot.tensor if slot.copy is None else slot.copy.clone()
        for norm in self._norms:
            found[norm] = {**norm._buffers, "running_mean": None, "running_var": None}
        return found

    def _describe(self, slot: _Slot) -> str:
        return f"buffer {slot.name!r} of {type(slot.module).__name__} in partition {self._index}"


def modules_of(root: nn.Module) -> list[nn.Module]:
    """Return `root` and all modules below it, each once.

    The same as `root.modules()`, in another order; that would take longer than a small task.
    """
    found: dict[nn.Module, None] = {}
    unseen = [root]
    while unseen:
        module = unseen.pop()
        if module not in found:
            found[module] = None
            unseen.extend([child for child in module._modules.values() if child is not None])
    return list(found)


_STATISTICS_ASIDE = {kind.forward for kind in (_BatchNorm, _InstanceNorm, nn.SyncBatchNorm, DeferredBatchNorm)}


def _begins_in_place(partition: nn.Module) -> bool:
    layers = [partition]
    while layers and isinstance(layers[0], (nn.Sequential, nn.Identity, nn.Flatten)):
        layers = [*layers[0].children(), *layers[1:]]
    return bool(layers) and getattr(layers[0], "inplace", False) is True


def _updates(module: nn.Module) -> bool:
    """Return whether a module's buffers are running statistics that its output does not depend on now."""
    return isinstance(module, _NormBase) and module.training and type(module).forward in _STATISTICS_ASIDE


def _slot(module: nn.Module, name: str, buffer: Tensor) -> _Slot:
    small = buffer.nbytes <= SMALL and not isinstance(module, _NormBase)
    with torch.no_grad():
        return _Slot(module, name, buffer, _version(buffer), buffer.clone() if small else None)


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version
