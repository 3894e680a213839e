"""Compile the layers of a pipeline by `torch.compile`."""

from types import MethodType
from typing import Any

import torch
from torch import nn

from torchgpipe.tensors._autograd import has_compiled_forward
from torchgpipe.trace.code.source import made
from torchgpipe.trace.layer import Layer

_CALL = "def call(self, *args, **kwargs):\n    return self._call_impl(*args, **kwargs)\n"


def compile_layer(layer: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Compile a layer by `torch.compile`, as `layer.compile()` does.

    PyTorch keeps at most 8 compiled versions of a Python function (`recompile_limit`), and then
    runs the function uncompiled. `layer.compile()` compiles a function of `nn.Module`, so all
    layers would share these 8 versions. Here, a new function is made and compiled for each layer.

    Args:
        layer: The layer. If its forward is already compiled, as by `torch.compile(layer)`, it stays
            as it is.
        *args: As for `torch.compile`.
        **kwargs: As for `torch.compile`.
    """
    if isinstance(layer, Layer):
        layer.compile(*args, **kwargs)
    elif not has_compiled_forward(layer):
        call = made(f"compiled {type(layer).__name__}", "call", _CALL, {})
        layer._compiled_call_impl = torch.compile(MethodType(call, layer), *args, **kwargs)


class CompilesLayers(nn.Module):
    """A module with partitions, whose `compile` compiles each of their layers."""

    _partitions: nn.ModuleList

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile each layer of this process by `torch.compile`.

        The layers are compiled when they first run. A layer is compiled anew where it would be
        without a pipeline, too: for evaluation, for another batch size, and so on.

        Args:
            *args: As for `torch.compile`.
            **kwargs: As for `torch.compile`.
        """
        for partition in self._partitions:
            for layer in partition.children():
                compile_layer(layer, *args, **kwargs)
