"""Keep the modes, hooks and constants of layers equal in a task's forward and recomputation.

What goes wrong without this guard: the user calls `model.eval()` between forward and backward. A
dropout layer would draw a mask in the forward, but not in the recomputation. So the gradients would
be wrong.

During a recomputation, the layers have the training mode and the hooks of the forward. If something
else changes between forward and backward, such as a dropout's `p` or a layer itself, an error is
raised.

What it costs: each first pass and each recomputation reads the mode of each module and whether it
has hooks. When the backward begins, the modules and their constants are compared once.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import nn

from torchgpipe.modules import Swap, Swapped, modules_of
from torchgpipe.task.guards.guard import Guard, GuardedTask

_RUN = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
_ABOUT = (
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)
_HOOKS = _RUN + _ABOUT
"""The attributes with a module's hooks, and then those that say how the hooks are called."""

_EVERYWHERE = [vars(nn.modules.module)[f"_global{name}"] for name in _RUN]
"""The dictionaries of the global hooks, which PyTorch runs for all modules."""

Items = tuple[tuple[object, ...], ...]
"""The items of each dictionary in `_HOOKS`."""


class LayerStates(NamedTuple):
    """The training modes and the hooks of a stage's modules.

    Attributes:
        modes: For each module, whether it is in training mode.
        hooks: For each module, its hooks; empty if no module has hooks.
    """

    modes: list[bool]
    hooks: list[Items]


class UnchangedLayers(Guard):
    """The guard that keeps a partition's layers the same in a task's forward and recomputation.

    If the user calls `model.eval()` between forward and backward, for example, a recomputation runs
    in training mode all the same, and with the hooks of the forward. An error is raised if
    constants, such as a dropout's `p`, were changed between forward and backward.

    Args:
        index: The index of the partition.
        modules: The partition, followed by all modules in it.
    """

    def __init__(self, index: int, modules: list[nn.Module]) -> None:
        self._index = index
        self._modules = modules
        self._constants = _constants(modules)

    def before_first_pass(self, task: GuardedTask) -> None:
        """Record the modes and hooks of the layers."""
        task.noted[self] = self.states()

    def before_recomputation(self, task: GuardedTask) -> Swapped | None:
        """Return a context that gives the layers the modes and hooks of the task's forward.

        If the layers have these modes and hooks now, return None.
        """
        before: LayerStates = task.noted[self]
        now = self.states()
        if now == before:
            return None
        none: list[Items] = [((),) * len(_HOOKS)] * len(self._modules)
        states = zip(
            self._modules, before.modes, before.hooks or none, now.hooks or none, strict=True
        )
        swaps = []
        for module, mode, hooks, present in states:
            # Two kinds of modules have no `training` of their own: those that torch.compile puts
            # around a module, and those of torch.jit.
            if "training" in module.__dict__ and mode != module.training:
                swaps.append(Swap(module.__dict__, "training", mode))
            if hooks != present:
                for name, items in zip(_HOOKS, hooks, strict=True):
                    dictionary: Any = OrderedDict(items)  # type: ignore[arg-type]
                    swaps.append(Swap(module.__dict__, name, dictionary))
        return Swapped(swaps)

    def states(self) -> LayerStates:
        """Return the current modes and hooks of the layers."""
        modes = []
        hooked = False
        for module in self._modules:
            modes.append(getattr(module, "training", False))  # torch.jit.freeze takes the mode away
            own = module.__dict__
            hooked = hooked or bool(
                own["_forward_hooks"]
                or own["_forward_pre_hooks"]
                or own["_backward_hooks"]
                or own["_backward_pre_hooks"]
            )
        hooks: list[Items] = []
        if hooked:
            for module in self._modules:
                own = module.__dict__
                hooks.append(tuple([tuple(own[name].items()) for name in _HOOKS]))
        return LayerStates(modes, hooks)

    def backward_begins(self) -> None:
        """Raise `RuntimeError` if layers or their constants have changed since the forward."""
        if modules_of(self._modules[0]) != self._modules:
            raise RuntimeError(
                f"a layer of partition {self._index} was replaced, added or removed between "
                "forward and backward, so a checkpointed task cannot be recomputed; change layers "
                "between steps only"
            )
        for known, present in zip(self._constants, _constants(self._modules), strict=True):
            module, name, before = known
            *_, now = present
            if now != before:
                raise RuntimeError(
                    f"the setting {name!r} of {type(module).__name__} in partition {self._index} "
                    f"was changed from {before!r} to {now!r} between forward and backward, so a "
                    "checkpointed task cannot be recomputed; change it between steps only"
                )


_UNDECLARED: dict[type, tuple[str, ...]] = {
    nn.MultiheadAttention: ("num_heads", "head_dim", "dropout"),
}
"""Constants of PyTorch's layers that are missing in `__constants__` of their classes."""


def _constants(modules: list[nn.Module]) -> list[tuple[nn.Module, str, object]]:
    """Return the values of modules that must not change between forward and backward.

    These values are:

    - the attributes that a layer's class lists in `__constants__`, such as a dropout's `p`
    - a method `forward` that was set on a single layer, and not on its class
    - the global hooks, which PyTorch runs for all modules

    Each value is returned together with its module and its name.
    """
    found: list[tuple[nn.Module, str, object]] = []
    for module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            continue  # its constants are compiled, and its `forward` appears at the first call
        kind: Any = type(module)
        names = ("forward", *_UNDECLARED.get(kind, ()), *getattr(kind, "__constants__", ()))
        for name in names:
            if name == "track_running_stats":
                continue  # a recomputation in another thread may have it exchanged
            found.append((module, name, module.__dict__.get(name)))
    everywhere = [tuple(hooks.items()) for hooks in _EVERYWHERE]
    return [*found, (modules[0], "hooks of all modules", everywhere)]
