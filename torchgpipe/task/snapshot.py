"""What a partition's layers hold when a mini-batch begins, so that a recomputation meets what the first pass met.

What can be put back for the second pass is put back: parameters, buffers, training mode. The rest is refused.

Buffers need three rules. Normalization layers in training update running statistics that their output does not depend
on: the second pass leaves them alone. Other small buffers may change with every pass (the vectors of spectral norm):
they are copied before a first pass if they have changed since the last copy. Large ones must not change.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from torchgpipe.task.batchnorm import DeferredBatchNorm
from torchgpipe.task.parameters import InPlace, StandInParameters
from torchgpipe.tensors._autograd import storage_of
from torchgpipe.tensors.item import versions
from torchgpipe.tensors.observe import NOTHING

SMALL = 1 << 16
"""Bytes up to which a buffer is copied."""


class _Slot(NamedTuple):
    """A buffer (or the place for one), how often it was changed in place, and its copy, if it is small."""

    module: nn.Module
    name: str
    tensor: Tensor | None
    version: list[int | None]
    copy: Tensor | None

    def is_as_before(self) -> bool:
        return self.module._buffers.get(self.name) is self.tensor and versions((self.tensor,)) == self.version


Buffers = tuple[_Slot, ...]


class LayerSnapshot:
    """What the layers of partition `index` hold when this is made. `recomputed`: whether a task will run them twice.

    Attributes:
        modules: all of the partition's modules, itself first.
        stand_ins: what tasks use in place of the parameters.
        held: the storages of parameters and buffers.
        lock: what keeps other threads from running the layers.
        begins_in_place: whether the first layer says, by its attribute `inplace`, that it changes its input in place.
    """

    def __init__(
        self, index: int, modules: list[nn.Module], lock: AbstractContextManager[object], *, recomputed: bool
    ) -> None:
        self.modules = modules
        self.stand_ins = StandInParameters(modules)
        held = (x for m in modules for d in (m._parameters, m._buffers) for x in d.values() if x is not None)
        self.held = frozenset(map(storage_of, held))
        self.begins_in_place = recomputed and begins_in_place(modules[0])
        self.lock = lock
        self._index = index
        self._recomputed = recomputed
        if recomputed:
            self._modes = [module.training for module in modules]
            self._hooks = [_hooks(module) for module in modules]
            self._settings = _settings(modules)
            # Norms that track statistics, in training: there their output does not depend on the statistics.
            self._norms = {m for m in modules if m.training and m._buffers and type(m).forward in _STATISTICS_ASIDE}
            self._slots: dict[tuple[nn.Module, str], _Slot] = {}

    def begin(self, backward: int) -> None:
        """Prepare for `backward`, unless that was done.

        Raises:
            RuntimeError: a gradient was added to the stand-ins meanwhile, or the layers are not the same any more.
        """
        if not self.stand_ins.begin(backward) or not self._recomputed:
            return
        if modules_of(self.modules[0]) != self.modules:
            raise RuntimeError(
                f"a layer of partition {self._index} was replaced, added or removed between forward and backward, so a "
                "checkpointed task cannot be recomputed; change layers between steps only"
            )
        for (module, name, before), (*_, now) in zip(self._settings, _settings(self.modules), strict=True):
            if now != before:
                raise RuntimeError(
                    f"{name!r} of {type(module).__name__} in partition {self._index} was changed from {before!r} to "
                    f"{now!r} between forward and backward, so a checkpointed task cannot be recomputed; change it "
                    "between steps only"
                )

    def check_kept(self) -> None:
        """Raise `RuntimeError` if a layer has replaced, added or frozen a parameter in its forward."""
        with self.lock:
            self.stand_ins.check_kept(self._index)

    def before_first_pass(self) -> Buffers:
        """Return the buffers as they are now, with copies of the small ones. The caller holds the lock."""
        held = [(m, name, x) for m in self._with_buffers() for name, x in m._buffers.items()]
        if not held:
            return ()
        storages = Counter(storage_of(x) for x in {id(x): x for _, _, x in held if x is not None}.values())
        # A buffer that shares memory with another is not copied, as the copies would no longer share it.
        return tuple([self._slot(*b, apart=b[2] is None or storages[storage_of(b[2])] == 1) for b in held])

    def after_first_pass(self, buffers: Buffers) -> None:
        """Raise `RuntimeError` if the first pass of a checkpointed task has changed a parameter or a large buffer."""
        self.stand_ins.check_unchanged(self._index, forward=True)
        for slot in buffers:
            if slot.tensor is not None and slot.copy is None and not slot.is_as_before():
                raise RuntimeError(
                    f"{self._describe(slot)} was changed in forward, so recomputing a checkpointed task would "
                    f"start from another value (buffers up to {SMALL} bytes that share no memory are copied, this "
                    f"one has {slot.tensor.nbytes}); use checkpoint='never', or do not change it in training"
                )

    def second_pass(self, buffers: Buffers) -> AbstractContextManager[object]:
        """Return a context for a recomputation, in which the layers hold what they held in the first pass.

        Raises:
            RuntimeError: something has changed that cannot be put back.
        """
        self.stand_ins.check_unchanged(self._index)
        same = [module.training for module in self.modules] == self._modes
        same = same and [_hooks(module) for module in self.modules] == self._hooks
        return NOTHING if same and not (buffers or self._norms or self._with_buffers()) else self._put_back(buffers)

    def _with_buffers(self) -> list[nn.Module]:
        return [module for module in self.modules if module._buffers and module not in self._norms]

    def _slot(self, module: nn.Module, name: str, buffer: Tensor | None, *, apart: bool) -> _Slot:
        """Return the buffer's slot; reuse the last one, with its copy, if the buffer has not changed since."""
        slot = self._slots.get((module, name))
        # Batch norm updates its statistics without counting a version, so they are copied for each pass in training.
        # In evaluation they do not change.
        norm = isinstance(module, _NormBase)
        if slot is None or not slot.is_as_before() or (norm and module.training):
            copy = None
            if buffer is not None and buffer.nbytes <= SMALL and apart and (module.training or not norm):
                with torch.no_grad():
                    copy = buffer.clone()
            slot = self._slots[module, name] = _Slot(module, name, buffer, versions((buffer,)), copy)
        return slot

    @contextmanager
    def _put_back(self, buffers: Buffers) -> Iterator[None]:
        replaced = self._first_buffers(buffers)
        norms = [norm.__dict__ for norm in self._norms]
        with (
            InPlace("training", [module.__dict__ for module in self.modules], self._modes),
            self._first_hooks(),
            InPlace("track_running_stats", norms, [False] * len(norms)),
            InPlace("_buffers", [module.__dict__ for module in replaced], [*replaced.values()]),
        ):
            yield

    @contextmanager
    def _first_hooks(self) -> Iterator[None]:
        changed = [(m, hooks) for m, hooks in zip(self.modules, self._hooks, strict=True) if _hooks(m) != hooks]
        places = [module.__dict__ for module, _ in changed]
        with ExitStack() as stack:
            for k, kind in enumerate(_HOOKS):
                stack.enter_context(InPlace(kind, places, [OrderedDict(hooks[k]) for _, hooks in changed]))
            yield

    def _first_buffers(self, buffers: Buffers) -> dict[nn.Module, dict[str, Tensor | None]]:
        """Return by module the buffers as the first pass met them; small ones as fresh copies, which may be changed."""
        found: dict[nn.Module, dict[str, Tensor | None]] = {module: {} for module in self._with_buffers()}
        copies: dict[int, Tensor] = {}  # one for a buffer that has two places
        for slot in buffers:
            if slot.copy is None and versions((slot.tensor,)) != slot.version:
                raise RuntimeError(
                    f"{self._describe(slot)} was changed in place between forward and backward, so the recomputation "
                    "of a checkpointed task would use other values; change it after backward()"
                )
            if slot.copy is not None and id(slot.tensor) not in copies:
                copies[id(slot.tensor)] = slot.copy.clone()
            found.setdefault(slot.module, {})[slot.name] = copies.get(id(slot.tensor), slot.tensor)
        return found | {norm: _WithoutStatistics(norm._buffers) for norm in self._norms}

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


_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


def _hooks(module: nn.Module) -> list[tuple[Any, ...]]:
    """Return the items of the module's dictionaries of forward hooks, in the order of `_HOOKS`."""
    own = module.__dict__
    if not own["_forward_hooks"] and not own["_forward_pre_hooks"]:
        return _NO_HOOKS
    return [tuple(own[kind].items()) for kind in _HOOKS]


_NO_HOOKS: list[tuple[Any, ...]] = [()] * len(_HOOKS)


def _settings(modules: list[nn.Module]) -> list[tuple[nn.Module, str, object]]:
    """Return what layers declare as constants (`__constants__`), as PyTorch's own do, such as a dropout's `p`."""
    return [
        (module, name, module.__dict__.get(name))
        for module in modules
        for name in getattr(type(module), "__constants__", ())
        if name != "track_running_stats"  # a recomputation in another thread may have it exchanged
    ]


_STATISTICS_ASIDE = {kind.forward for kind in (_BatchNorm, nn.SyncBatchNorm, DeferredBatchNorm)}


class _WithoutStatistics(dict[str, Any]):
    """The buffers of a batch norm in a recomputation: it normalizes by its input, and needs no statistics."""

    def __getitem__(self, name: str) -> Any:
        if name in ("running_mean", "running_var"):
            raise RuntimeError(
                "a layer uses the running statistics of a batch norm in training, which have changed since the first "
                "pass of a checkpointed task; use checkpoint='never', or keep the norm in evaluation mode"
            )
        return super().__getitem__(name)


def begins_in_place(partition: nn.Module) -> bool:
    """Return whether the first layer says, by its attribute `inplace`, that it changes its input in place."""
    layers = [partition]
    while layers and isinstance(layers[0], (nn.Sequential, nn.Identity, nn.Flatten)):
        layers = [*layers[0].children(), *layers[1:]]
    return bool(layers) and getattr(layers[0], "inplace", False) is True
