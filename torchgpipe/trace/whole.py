"""Decide which submodules are kept whole: recorded as a single call, and not cut into layers."""

from collections.abc import Container

from torch import nn
from torch.nn import Module

from torchgpipe.tensors._autograd import is_compiled

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
    """Return whether a submodule is kept whole: recorded as one call, and not cut into layers."""
    own = type(module).__module__.startswith("torch.") and not isinstance(module, _OPENED)
    childless = all(child is None for child in module._modules.values())
    return module in whole or own or hooks_of(module) or is_compiled(module) or childless


def hooks_of(module: Module) -> bool:
    """Return whether a module has hooks that run when it is called."""
    return any(vars(module).get(name) for name in HOOKS)
