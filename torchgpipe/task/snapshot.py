"""What a partition's layers hold when a mini-batch begins, so that a recomputation meets what the first pass met.

What can be put back for the second pass is put back: parameters, buffers, training mode. The rest is refused.

Normalization layers in training update running statistics that their output does not depend on: the second pass leaves
them alone. Other buffers may change with every pass (the vectors of spectral norm): they are copied before a first pass
if they have changed since the last copy. Their versions do not tell, as kernels (`F.batch_norm`, observers of
quantization), `.data` and NumPy write without counting, so what they hold is compared.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import itemgetter
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from torchgpipe.task.batchnorm import DeferredBatchNorm
from torchgpipe.task.contents import BuffersOfThread, comparable, copied, equal
from torchgpipe.task.in_place import Change, InPlace, InPlaceForRun, Lock
from torchgpipe.task.parameters import StandInParameters
from torchgpipe.tensors._autograd import (
    is_compiled,
    refuse_cached_parametrizations,
    storage_of,
    within_plain_checkpoint,
)
from torchgpipe.tensors.checkpoint import has_asked, is_recomputing
from torchgpipe.tensors.item import versions
from torchgpipe.tensors.observe import NOTHING

COMPARED = ["cpu", "meta"]
"""The types of devices that compare at once. On others small buffers are copied, instead of waiting for the device, and
large ones compared when the forward is over."""

SMALL = 1 << 16
"""Bytes of a small buffer."""


class _Slot(NamedTuple):
    """A buffer, or the place for one; its copy, unless it has a stand-in; whether others share its memory."""

    module: nn.Module
    name: str
    tensor: Tensor | None
    version: list[int | None]
    copy: Tensor | None
    shared: bool


_States = tuple[list[bool], list[list[tuple[Any, ...]]]]


class Held(NamedTuple):
    """What layers held before a first pass, and which of the buffers it has changed in a way that PyTorch counts."""

    buffers: tuple[_Slot, ...]
    states: _States
    changed: list[_Slot]


class LayerSnapshot:
    """What the layers of partition `index` hold when this is made. `recomputed`: whether a task will run them twice.

    `modules` are all of the partition's, itself first; `held` the storages of parameters and buffers. Which outputs
    take a gradient depends on `kind`, beside which inputs do. By the latter `claims` say whether all outputs that can
    take one do; mini-batches of one kind share them.
    """

    def __init__(
        self,
        index: int,
        modules: list[nn.Module],
        lock: Lock,
        *,
        recomputed: bool,
        stand_ins: bool = True,
    ) -> None:
        refuse_cached_parametrizations()
        self.modules = modules
        self.stand_ins = StandInParameters(modules if stand_ins else [])
        # What tasks put into the layers one by one: all stand-ins, unless a run has them in place from begin to end.
        self.of_tasks: Sequence[Change] = self.stand_ins.changes
        held = (x for m in modules for d in (m._parameters, m._buffers) for x in d.values() if x is not None)
        self.held = frozenset(map(storage_of, held))
        self.begins_in_place = recomputed and begins_in_place(modules[0])
        self.lock = lock
        self._index = index
        self._recomputed = recomputed
        # Norms that track statistics, in training: there their output does not depend on the statistics.
        norms = [m for m in modules if recomputed and m.training and type(m).forward in _STATISTICS_ASIDE]
        self._norms = {norm for norm in norms if norm._buffers and norm._buffers.keys() <= _STATISTICS}
        self._unsure: dict[tuple[nn.Module, str], _Slot] = {}  # used again, and not compared
        if recomputed:
            self.claims: dict[tuple[bool, ...], bool] = {}
            self.kind = (*[module.training for module in modules], *self.stand_ins.needs)
            self._settings = _settings(modules)
            self._slots: dict[tuple[nn.Module, str], _Slot] = {}

    def begin(self, backward: int) -> None:
        """Prepare for `backward`, unless that was done; raise `RuntimeError` if layers or gradients have changed."""
        if not self.stand_ins.begin(backward) or not self._recomputed:
            return
        refuse_cached_parametrizations()
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
        self.check_sure()

    def check_sure(self) -> None:
        """Raise `RuntimeError` if a buffer has changed in a way that only its content tells."""
        for (module, name), slot in self._unsure.items():
            if slot.tensor is not None and slot.copy is not None and not equal(slot.tensor, slot.copy):
                raise RuntimeError(
                    f"buffer {name!r} of {type(module).__name__} in partition {self._index} was changed by a kernel or "
                    "through .data, which PyTorch does not count, so a recomputation may use another value; change "
                    "it by an operator (copy_), or use checkpoint='never'"
                )

    def in_place(self) -> AbstractContextManager[object]:
        """Put stand-ins into the layers for a task. The caller holds the lock."""
        return InPlace(self.of_tasks) if self.of_tasks else NOTHING

    def check_kept(self) -> None:
        """Raise `RuntimeError` if a layer has replaced, added or frozen a parameter in its forward."""
        with self.lock:
            self.stand_ins.check_kept(self._index)

    def before_first_pass(self) -> Held:
        """Return what the layers hold now, with copies of buffers. The caller holds the lock."""
        held = [(m, name, x) for m in self._with_buffers() for name, x in m._buffers.items()]
        if held and (changed := {id(x) for m, name, x in held if self._has_changed(m, name, x)}):
            storages = {id(x): storage_of(x) for _, _, x in held if x is not None}
            times = Counter[int | None](storages.values())
            stale = {*map(storages.get, changed)}
            # Copies share memory as the buffers do, so those that share it are copied together.
            copies: dict[Any, Any] = {}
            for module, name, x in held:
                if (storage := storages.get(id(x))) in stale:
                    shared = times[storage] > 1
                    copy = copied(None if id(x) in self.stand_ins.ids else x, shared, copies)
                    self._slots[module, name] = _Slot(module, name, x, versions((x,)), copy, shared)
        return Held(tuple([self._slots[module, name] for module, name, _ in held]), _states(self.modules), [])

    def after_first_pass(self, held: Held) -> None:
        """Note which buffers a first pass has changed; raise `RuntimeError` if it has changed a parameter."""
        self.stand_ins.check_unchanged(self._index, forward=True)
        for slot in held.buffers:
            now = slot.module._buffers.get(slot.name)
            if now is not slot.tensor or versions((now,)) != slot.version:
                held.changed.append(slot)

    def second_pass(self, held: Held) -> AbstractContextManager[object]:
        """Return a context in which layers hold what they held in the first pass, or raise `RuntimeError`."""
        self.stand_ins.check_unchanged(self._index)
        changed = self._changed_since(held)
        same = not changed and not self._norms and _states(self.modules) == held.states
        return NOTHING if same else self._put_back(held, changed)

    def _changed_since(self, held: Held) -> set[nn.Module]:
        """Return the modules whose buffers are not what they were in the first pass, or may not be."""
        now = {(module, name): x for module in self._with_buffers() for name, x in module._buffers.items()}
        changed = set()
        for slot in held.buffers:
            place = slot.module, slot.name
            if place not in now or not _as_held(slot, now.pop(place)):
                changed.add(slot.module)
        return changed | {module for module, _ in now}

    def _with_buffers(self) -> list[nn.Module]:
        return [module for module in self.modules if module._buffers and module not in self._norms]

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

    def backward(self) -> AbstractContextManager[object]:
        """Return a context for the layers' backward, in which they may run once more, by `torch.utils.checkpoint`."""
        buffers = [Change(norm.__dict__, "_buffers", _Unread(norm._buffers)) for norm in self._norms]
        return InPlace(buffers) if buffers else NOTHING

    @contextmanager
    def _put_back(self, held: Held, changed: set[nn.Module]) -> Iterator[None]:
        replaced: dict[nn.Module, dict[str, Tensor | None]] = {module: {} for module in changed}
        copies: dict[Any, Any] = {}  # which the layers may change
        for slot in held.buffers:
            if slot.module in changed:
                x = copied(slot.copy, slot.shared, copies)
                replaced[slot.module][slot.name] = slot.tensor if x is None else x
        put = [(slot, replaced[slot.module][slot.name]) for slot in held.changed if slot.module in changed]
        before = versions(tuple([x for _, x in put]))
        compiled = bool(changed) and any(map(is_compiled, self.modules))
        first = [
            # torch.compile understands plain dictionaries only.
            Change(m.__dict__, "_buffers", own if compiled else BuffersOfThread(own, m._buffers))
            for m, own in replaced.items()
        ]
        first += [Change(norm.__dict__, "track_running_stats", False) for norm in self._norms]
        (modes, then), (_, now) = held.states, _states(self.modules)
        none = [_NO_HOOKS] * len(modes)
        for module, mode, hooks, present in zip(self.modules, modes, then or none, now or none, strict=True):
            # What torch.compile puts around a module has no mode of its own.
            if mode != module.training and "training" in module.__dict__:
                first.append(Change(module.__dict__, "training", mode))
            if present != hooks:
                for kind, items in zip(_HOOKS, hooks, strict=True):
                    first.append(Change(module.__dict__, kind, OrderedDict(items)))
        with self.backward(), InPlace(first):
            yield
            for (slot, x), version in zip(put, before, strict=True):
                if not has_asked() and replaced[slot.module].get(slot.name) is x and versions((x,)) == [version]:
                    raise RuntimeError(
                        f"a layer of partition {self._index} changed buffer {slot.name!r} of "
                        f"{type(slot.module).__name__} in its first pass, and not in the recomputation: it decides by "
                        "something that is no buffer; make that a buffer, ask is_recomputing(), or use "
                        "checkpoint='never'"
                    )


def stand_ins_for_run(snapshots: Sequence[LayerSnapshot]) -> AbstractContextManager[object]:
    """Return a context for a run, in which the stand-ins of all these stages are in their layers.

    A layer that several stages have in common cannot serve them all at once: its stand-ins are left to each task.
    """
    times = Counter[int]()
    for snapshot in snapshots:
        times.update({id(change.place) for change in snapshot.stand_ins.changes})
    parts = []
    for snapshot in snapshots:
        changes = snapshot.stand_ins.changes
        snapshot.of_tasks = [change for change in changes if times[id(change.place)] > 1]
        own = [change for change in changes if times[id(change.place)] == 1]
        parts.append((snapshot.lock, InPlace(own)))
    return InPlaceForRun(parts)


def _as_held(slot: _Slot, now: Tensor | None) -> bool:
    """Return whether a buffer is for sure what it was before a first pass, so that the second may have it as it is."""
    if now is not slot.tensor or versions((now,)) != slot.version:
        return False
    if now is None or slot.copy is None:
        return True
    return now.device.type in COMPARED and bool(equal(now, slot.copy))


def modules_of(root: nn.Module) -> list[nn.Module]:
    """Return `root` and all modules below it, as `root.modules()`, which would take longer than a small task."""
    found: dict[nn.Module, None] = {}
    unseen = [root]
    while unseen:
        module = unseen.pop()
        if module not in found:
            found[module] = None
            unseen.extend([child for child in module._modules.values() if child is not None])
    return list(found)


_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip

_NO_HOOKS: list[tuple[Any, ...]] = [()] * len(_HOOKS)
_ASKED = itemgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL = [vars(nn.modules.module)[f"_global{name}"] for name in (_HOOKS[0], _HOOKS[3], *_HOOKS[5:])]


def _states(modules: list[nn.Module]) -> _States:
    """Return the modules' modes, and if any of them has hooks, the items of those dictionaries, in `_HOOKS`' order."""
    owns = [*map(vars, modules)]
    hooks = [[(*own[kind].items(),) for kind in _HOOKS] for own in owns] if any(map(any, map(_ASKED, owns))) else []
    return [module.training for module in modules], hooks


def _settings(modules: list[nn.Module]) -> list[tuple[nn.Module, str, object]]:
    """Return what layers declare as constants (`__constants__`), as PyTorch's own do, such as a dropout's `p`.

    And a `forward` that was put on a layer, and hooks of all modules.
    """
    more: dict[type, tuple[str, ...]] = {nn.MultiheadAttention: ("num_heads", "head_dim", "dropout")}
    found: list[tuple[nn.Module, str, object]] = [
        (module, name, module.__dict__.get(name))
        for module in modules
        for name in ("forward", *more.get(type(module), ()), *getattr(type(module), "__constants__", ()))
        if name != "track_running_stats"  # a recomputation in another thread may have it exchanged
    ]
    return [*found, (modules[0], "hooks of all modules", [(*x.items(),) for x in _GLOBAL] if any(_GLOBAL) else [])]


_STATISTICS = {"running_mean", "running_var", "num_batches_tracked"}
_STATISTICS_ASIDE = {kind.forward for kind in (_BatchNorm, nn.SyncBatchNorm, DeferredBatchNorm)}


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

    def _refuse(self) -> None:
        if is_recomputing():  # another thread may look at the layers meanwhile
            raise RuntimeError(
                "a layer uses the running statistics of a batch norm in training, which have changed since the first "
                "pass of a checkpointed task; use checkpoint='never', or keep the norm in evaluation mode"
            )


def begins_in_place(partition: nn.Module) -> bool:
    """Return whether the first layer says, by its attribute `inplace`, that it changes its input in place."""
    layers = [partition]
    while layers and isinstance(layers[0], (nn.Sequential, nn.Identity, nn.Flatten)):
        layers = [*layers[0].children(), *layers[1:]]
    return bool(layers) and getattr(layers[0], "inplace", False) is True
