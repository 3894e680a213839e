"""Compile the layers of a pipeline by `torch.compile`."""

import warnings
from types import MethodType
from typing import Any

import torch
from torch import nn

from torchgpipe.tensors._autograd import has_compiled_forward
from torchgpipe.trace.code.source import function_from
from torchgpipe.trace.layer import Layer

_CALL = "def call(self, *args, **kwargs):\n    return self._call_impl(*args, **kwargs)\n"


def compile_layer(layer: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Compile a layer by `torch.compile`, with a recompilation limit of its own.

    PyTorch keeps at most 8 compiled versions of a Python function (`recompile_limit`). After that,
    it runs the function uncompiled. `layer.compile()` compiles a function of `nn.Module`, so all
    layers would share these 8 versions. Here, a new Python function is made for each layer, and
    compiled.

    Args:
        layer: The layer. If its forward is already compiled, for example by `torch.compile(layer)`,
            the layer stays as it is.
        *args: As for `torch.compile`.
        **kwargs: As for `torch.compile`.
    """
    if isinstance(layer, Layer):
        layer.compile(*args, **kwargs)
    elif not has_compiled_forward(layer):
        call = function_from(f"compiled {type(layer).__name__}", "call", _CALL, {})
        layer._compiled_call_impl = torch.compile(MethodType(call, layer), *args, **kwargs)


class CompilesLayers(nn.Module):
    """A base class of pipelines: its method `compile` compiles each layer of the partitions."""

    _partitions: nn.ModuleList
    schedule: Any

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile each layer of this process's partitions by `torch.compile`.

        A layer is compiled when it first runs. As without a pipeline, it is compiled again when its
        inputs or its mode change: for evaluation, for another batch size, and so on. With
        checkpointing, it is compiled once more, for forwards that need no autograd graph.

        Args:
            *args: As for `torch.compile`.
            **kwargs: As for `torch.compile`.
        """
        if self.schedule.splits:
            warnings.warn(
                f"the schedule {self.schedule.name} splits backwards into two halves, but the "
                "backward of a compiled layer cannot be split, so this schedule saves no time; "
                "take another one, such as 1F1B, or leave out compile()",
                stacklevel=2,
            )
        for partition in self._partitions:
            for layer in partition.children():
                compile_layer(layer, *args, **kwargs)
