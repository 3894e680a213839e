"""Copy modules with buffers that are in partitions on several devices, such as rotary embeddings.

A buffer is on one device only. If the blocks of a model share a rotary embedding, for example, the
partitions on other devices could not use its buffers.
"""

import copy
from collections.abc import Iterable

import torch
from torch import nn


def copy_for_each_device(
    partitions: Iterable[tuple[nn.Module, torch.device]],
) -> list[tuple[nn.Module, str]]:
    """Give each device a copy of every module that has buffers and is on several devices.

    The first of these devices keeps the module itself. The copies have copies of its buffers and of
    its containers (dictionaries, lists and sets), but share everything else with it, such as its
    parameters and hooks.

    Args:
        partitions: Each partition of this process, with its device. In these partitions, the
            modules are replaced by their copies.

    Returns:
        All buffers of which there are copies now: a pair for each, of a module (one that was copied
        or a copy) and the name of a buffer in it. If a layer changed one of these buffers, the
        others would keep the old value. So the pipeline has to check that none of them changes.
    """
    copies = _Copies()
    for partition, device in partitions:
        copies.replace_in(partition, device)
    return copies.buffers()


class _Copies:
    """The modules that were found so far, and the copies that were made of them."""

    def __init__(self) -> None:
        self._homes: dict[nn.Module, torch.device] = {}  # the first device of each module
        self._copies: dict[tuple[nn.Module, torch.device], nn.Module] = {}
        self._seen: set[tuple[nn.Module, torch.device]] = set()

    def replace_in(self, parent: nn.Module, device: torch.device) -> None:
        """Replace the modules inside of `parent` that are at home on another device."""
        if (parent, device) in self._seen:
            return
        self._seen.add((parent, device))
        for name, child in parent._modules.items():
            if child is None:
                continue
            home = self._homes.setdefault(child, device)
            if home != device and _has_buffers(child):
                key = child, device
                if key not in self._copies:
                    self._copies[key] = _copy(child)
                    self._homes[self._copies[key]] = device
                parent._modules[name] = self._copies[key]
            self.replace_in(parent._modules[name], device)  # type: ignore[arg-type]

    def buffers(self) -> list[tuple[nn.Module, str]]:
        """Return a pair for each buffer of which there are copies: a module, and a name in it."""
        modules: dict[nn.Module, None] = {}
        for (module, _), made in self._copies.items():
            modules[module] = None
            modules[made] = None
        places = []
        for module in modules:
            places += [(module, name) for name in module._buffers]
        return places


def _has_buffers(module: nn.Module) -> bool:
    """Return whether a module has buffers. They may be `None`, if a forward makes them later."""
    return any(part._buffers for part in module.modules())


def _copy(module: nn.Module) -> nn.Module:
    """Return a module that has its own buffers and containers, but shares all else, even hooks.

    Raises:
        TypeError: If the module's forward belongs to this object, or a buffer requires grad.
    """
    kind = type(module).__name__
    if "forward" in vars(module) or isinstance(module, torch.fx.GraphModule):
        raise TypeError(
            f"a {kind} with buffers is in layers on several devices, which need a copy each, but "
            "its forward belongs to this object: compile after the pipeline is made, or give each "
            "layer a module of its own"
        )
    for name, x in module._buffers.items():
        if x is not None and x.requires_grad:
            raise TypeError(
                f"buffer {name!r} of {kind} requires grad, and is in layers on several devices, "
                "whose copies would train apart: make it a parameter"
            )
    made = module.__class__.__new__(module.__class__)
    for name, value in module.__dict__.items():
        # A container can be a cache of tensors on the device.
        own = isinstance(value, dict | list | set) and "_hooks" not in name
        made.__dict__[name] = copy.copy(value) if own else value
    made.__dict__.pop("_compiled_call_impl", None)  # it would call the given module
    for name, x in module._buffers.items():
        if x is not None:
            made._buffers[name] = x.clone()
    return made
