"""Decide which submodules are kept whole: recorded as a single call, and not cut into layers."""

from collections.abc import Container, Iterable

from torch import nn
from torch.nn import Module

from torchgpipe.caught import shortened
from torchgpipe.tensors._autograd import is_compiled

Whole = Module | type[Module]
"""A submodule, or a class of submodules."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

# All of PyTorch's own modules are kept whole, except for these containers.
_OPENED = (
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
)


def stays_whole(module: Module, whole: Container[Module]) -> bool:
    """Return whether a submodule is kept whole: recorded as one call, and not cut into layers.

    Args:
        module: The submodule.
        whole: The submodules that must be kept whole. PyTorch's own layers, and submodules that are
            compiled, have hooks or have no submodules, are kept whole in any case.
    """
    own = type(module).__module__.startswith("torch.") and not isinstance(module, _OPENED)
    childless = all(child is None for child in module._modules.values())
    return module in whole or own or hooks_of(module) or is_compiled(module) or childless


def hooks_of(module: Module) -> bool:
    """Return whether a module has forward or backward hooks, which run when it is called."""
    return any(vars(module).get(name) for name in HOOKS)


def kept_by_user(module: Module, whole: Iterable[Whole]) -> set[Module]:
    """Return the submodules that a user keeps whole: they are not cut into layers.

    Args:
        module: The module that is cut into layers.
        whole: The argument `whole` of `sequential`: submodules, or classes of submodules.

    Raises:
        TypeError: If `whole` is not a list of modules and classes.
        ValueError: If the module has no such submodule.
    """
    what = "whole must be a list of submodules or their classes"
    if isinstance(whole, str | type | Module) or not isinstance(whole, Iterable):
        raise TypeError(f"{what}, but got {shortened(whole)}")
    kept: set[Module] = set()
    for chosen in whole:
        if isinstance(chosen, str):
            raise TypeError(
                "whole must be a list of submodules or their classes, but it contains the string "
                f"{chosen!r}; give "
                f"module.get_submodule({chosen!r}) instead"
            )
        if not isinstance(chosen, type | Module):
            raise TypeError(f"{what}, but has {shortened(chosen)}")
        alike: set[Module] = set()
        for m in module.modules():
            if m is chosen or (isinstance(chosen, type) and isinstance(m, chosen)):
                alike.add(m)
        if not alike:
            kind = chosen if isinstance(chosen, type) else type(chosen)
            raise ValueError(f"{type(module).__name__} has no submodule {kind}")
        kept |= alike
    return kept
