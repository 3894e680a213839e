"""Test cases with PyTorch tools around a training step, and with `torch.compile` and exporters."""

from functools import partial
from typing import Any

import torch
import torch._dynamo
from torch import nn

from examples.works_with import (
    Batches,
    activations_on_the_host,
    average_of_weights,
    exported,
    hooks_of_layers,
    hooks_of_parameters,
    layers_alone,
    mixed_precision,
    optimizer_in_backward,
    traced,
    train,
)

from ....plain import Plain
from ...parts.layers import checkpointed, linear, made
from ...row import Row, steps
from .rows import ALONE, LONG, changed, tool

graphs: list[object] = []


def backend(graph: Any, inputs: object) -> Any:
    """Record the graph, and return it unchanged."""
    graphs.append(graph)
    return graph


def train_compiled(run: nn.Module, batches: Batches, compiled: bool) -> Any:
    """Train, and check that `torch.compile` compiles something exactly if `compiled` is true.

    The number of compilations is not checked, because several workers can compile the same layer at
    once.
    """
    graphs.clear()
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=64):
        losses = train(run, batches)
    assert bool(graphs) == compiled
    return losses


def compile_model(run: nn.Module, batches: Batches) -> Any:
    model: Any = torch.compile(run, backend=backend)
    return train_compiled(model, batches, compiled=isinstance(run, Plain))


def compile_in_place(layers: Any) -> None:
    for layer in layers:
        layer.compile(backend=backend)


def compile_each(layers: Any) -> None:
    for name, layer in layers.named_children():
        layers._modules[name] = torch.compile(layer, backend=backend)


CANNOT_BE_TRACED = r"cannot be traced or exported; "
TRACED = CANNOT_BE_TRACED + r"(call model.eval\(\) first|load the states of all ranks)"
EXPORTED = (
    CANNOT_BE_TRACED + r"call model.eval\(\) first, or trace or export its layers, model\[:\]"
)

ROWS = [
    tool(
        "`autocast`, `GradScaler` and clipping",
        mixed_precision,
        "Under autocast, each micro-batch has an autograd graph of its own. So the gradients of "
        "micro-batches are summed in full precision.",
    ),
    tool(
        "hooks of parameters",
        hooks_of_parameters,
        "A parameter's hooks run once in each step, with the gradient of the whole mini-batch.",
        **ALONE,
    ),
    tool(
        "an optimizer in backward",
        optimizer_in_backward,
        "A hook of each parameter (`register_post_accumulate_grad_hook`) runs the parameter's "
        "optimizer as soon as the parameter has its gradient.",
    ),
    tool(
        "hooks of layers and of the model",
        hooks_of_layers,
        "Hooks of a layer run once for each micro-batch. Hooks of the whole model run once for "
        "each call `model(x)`. In `model.step`, forward hooks of the whole model run once for each "
        "micro-batch, and its full backward hooks are refused. If a layer is recomputed, its "
        "forward hooks run again.",
        **ALONE,
    ),
    tool(
        "an average of the weights",
        average_of_weights,
        "`AveragedModel` copies the pipeline, and the copy is a pipeline, too.",
        **ALONE,
    ),
    tool(
        "`save_on_cpu` and other `saved_tensors_hooks`",
        activations_on_the_host,
        "The hooks are not called for the tensors of a recomputation. With worker threads, they "
        "are called only for the tensors of the last partition.",
    ),
    Row(
        "`torch.utils.checkpoint` inside a layer",
        made(linear, partial(checkpointed, False), partial(checkpointed, True)),
        use=steps,
        note="Both `use_reentrant=True` and `use_reentrant=False` work.",
        **ALONE,
    ),
    changed(
        "`torch.compile` of the layers",
        compile_in_place,
        "Call `layer.compile()` for each layer. All layers then share PyTorch's limit of 8 "
        "compilations. With `model.compile()`, each layer has a limit of its own. PyTorch 2.11 "
        'can crash if a process first compiles layers on the engine "workers", and then compiles '
        'other layers on the engine "graph".',
        use=partial(train_compiled, compiled=True),
        without=LONG,
    ),
    changed(
        "`torch.compile(layer)` in the place of a layer",
        compile_each,
        "The layer is compiled as by `layer.compile()`. As without a pipeline, `_orig_mod` is "
        "added to the names in the state dict.",
        use=partial(train_compiled, compiled=True),
        without=LONG,
    ),
    tool(
        "`torch.compile(model)`",
        compile_model,
        "This call compiles nothing. Call `model.compile()` instead.",
        without={**ALONE["without"], **LONG},
    ),
    tool(
        "`torch.jit.trace(model, x)` in training",
        traced,
        "If all partitions are on one device, call `model.eval()` first, or trace only the layers "
        "(`model[:]`). If `sequential` made the layers, trace the module itself.",
        refused={"": TRACED},
    ),
    tool(
        "`torch.export.export(model, (x,))` in training",
        exported,
        "If all partitions are on one device, call `model.eval()` first, or export only the layers "
        "(`model[:]`). If `sequential` made the layers, export the module itself.",
        refused={"": EXPORTED},
        **ALONE,
    ),
    tool(
        "`torch.jit.trace` and `torch.export` of `model[:]`",
        layers_alone,
        "The layers run on the whole mini-batch at once, not on micro-batches.",
        **ALONE,
    ),
]
