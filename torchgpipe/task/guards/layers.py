"""Layers in two passes: their modes, hooks and constants are in the recomputation what they were in the first pass.

What goes wrong without it: `model.eval()` between forward and backward, to evaluate. A dropout would draw a mask in the
first pass, and none in the recomputation, so that gradients would be those of another model.

Modes and hooks are put back for as long as a recomputation runs. What else changes between forward and backward, a
dropout's `p` or the layers themselves, is refused. Its cost is one look at each module before each pass.
"""

from collections import OrderedDict
from contextlib import AbstractContextManager
from operator import itemgetter
from typing import Any, NamedTuple

from torch import nn

from torchgpipe.task.guards.in_place import Change, InPlace
from torchgpipe.tensors.observe import NOTHING

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_NO_HOOKS: list[tuple[Any, ...]] = [()] * len(_HOOKS)
_RUN_HOOKS = itemgetter(
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
)
_OF_ALL_MODULES = [
    vars(nn.modules.module)[f"_global{name}"] for name in (_HOOKS[0], _HOOKS[3], *_HOOKS[5:])
]


class LayerStates(NamedTuple):
    """The modes of modules, and if any of them has hooks, the items of those dictionaries, in the order of `_HOOKS`."""

    modes: list[bool]
    hooks: list[list[tuple[Any, ...]]]


class Layers:
    """The layers of partition `index` in a mini-batch: `modules`, the partition itself first."""

    def __init__(self, index: int, modules: list[nn.Module]) -> None:
        self._index = index
        self._modules = modules
        self._constants = _constants(modules)

    def before_first_pass(self) -> LayerStates:
        """Return the states of the layers now."""
        owns = [*map(vars, self._modules)]
        hooks = []
        if any(map(any, map(_RUN_HOOKS, owns))):
            hooks = [[(*own[kind].items(),) for kind in _HOOKS] for own in owns]
        return LayerStates([module.training for module in self._modules], hooks)

    def again(self, before: LayerStates) -> AbstractContextManager[object]:
        """Return a context in which the layers have the states that they had before the first pass."""
        now = self.before_first_pass()
        if now == before:
            return NOTHING
        none = [_NO_HOOKS] * len(self._modules)
        changes = []
        states = zip(
            self._modules, before.modes, before.hooks or none, now.hooks or none, strict=True
        )
        for module, mode, hooks, present in states:
            # What torch.compile puts around a module has no mode of its own.
            if mode != module.training and "training" in module.__dict__:
                changes.append(Change(module.__dict__, "training", mode))
            if hooks != present:
                for kind, items in zip(_HOOKS, hooks, strict=True):
                    changes.append(Change(module.__dict__, kind, OrderedDict(items)))
        return InPlace(changes)

    def backward_begins(self) -> None:
        """Raise `RuntimeError` if layers, or their constants, are others than in the forward."""
        if modules_of(self._modules[0]) != self._modules:
            raise RuntimeError(
                f"a layer of partition {self._index} was replaced, added or removed between forward and backward, so a "
                "checkpointed task cannot be recomputed; change layers between steps only"
            )
        for (module, name, before), (*_, now) in zip(
            self._constants, _constants(self._modules), strict=True
        ):
            if now != before:
                raise RuntimeError(
                    f"{name!r} of {type(module).__name__} in partition {self._index} was changed from {before!r} to "
                    f"{now!r} between forward and backward, so a checkpointed task cannot be recomputed; change it "
                    "between steps only"
                )


def _constants(modules: list[nn.Module]) -> list[tuple[nn.Module, str, object]]:
    """Return what layers declare as constants (`__constants__`), as PyTorch's own do, such as a dropout's `p`.

    And a `forward` that was put on a layer, and hooks of all modules.
    """
    more: dict[type, tuple[str, ...]] = {
        nn.MultiheadAttention: ("num_heads", "head_dim", "dropout")
    }
    found: list[tuple[nn.Module, str, object]] = []
    for module in modules:
        kind = type(module)
        for name in ("forward", *more.get(kind, ()), *getattr(kind, "__constants__", ())):
            if (
                name != "track_running_stats"
            ):  # a recomputation in another thread may have it exchanged
                found.append((module, name, module.__dict__.get(name)))
    everywhere = [(*hooks.items(),) for hooks in _OF_ALL_MODULES] if any(_OF_ALL_MODULES) else []
    return [*found, (modules[0], "hooks of all modules", everywhere)]


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
