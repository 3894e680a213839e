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
    traced_and_exported,
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
    """Train, and check whether `torch.compile` has compiled anything, as `compiled` says.

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
        "Autocast keeps no copies of weights between micro-batches: their gradients are summed in "
        "full precision.",
    ),
    tool(
        "hooks of parameters",
        hooks_of_parameters,
        "Once a step, with the mini-batch's gradient.",
        **ALONE,
    ),
    tool(
        "an optimizer in backward",
        optimizer_in_backward,
        "By `register_post_accumulate_grad_hook`.",
    ),
    tool(
        "hooks of layers and of the model",
        hooks_of_layers,
        "A layer's run once per micro-batch, the model's once a step. A layer's forward hooks run "
        "again when it is recomputed.",
        **ALONE,
    ),
    tool(
        "an average of the weights",
        average_of_weights,
        "`AveragedModel` holds another pipeline.",
        **ALONE,
    ),
    tool(
        "`save_on_cpu` and other `saved_tensors_hooks`",
        activations_on_the_host,
        "They do not reach what is recomputed, and with workers only the last partition.",
    ),
    Row(
        "`torch.utils.checkpoint` inside a layer",
        made(linear, partial(checkpointed, False), partial(checkpointed, True)),
        use=steps,
        note="Reentrant or not.",
        **ALONE,
    ),
    changed(
        "`torch.compile` of the layers",
        compile_in_place,
        "By `layer.compile()`. All layers share PyTorch's limit of 8 compilations: "
        "`model.compile()` gives each layer its own. PyTorch 2.11 can crash if one process "
        'compiles layers first on the engine "workers", and then others on the engine "graph".',
        use=partial(train_compiled, compiled=True),
        without=LONG,
    ),
    changed(
        "`torch.compile(layer)` in the place of a layer",
        compile_each,
        "As `layer.compile()`; names of state get `_orig_mod`, as without a pipeline.",
        use=partial(train_compiled, compiled=True),
        without=LONG,
    ),
    tool(
        "`torch.compile(model)`",
        compile_model,
        "It compiles nothing: call `model.compile()`.",
        without={**ALONE["without"], **LONG},
    ),
    tool(
        "`torch.jit.trace(model, x)` in training",
        traced,
        "Call `model.eval()` first, or trace the layers, `model[:]`.",
        refused={"": TRACED},
    ),
    tool(
        "`torch.export.export(model, (x,))` in training",
        exported,
        "Call `model.eval()` first, or export the layers, `model[:]`.",
        refused={"": EXPORTED},
        **ALONE,
    ),
    tool(
        "`torch.jit.trace` and `torch.export` in evaluation",
        traced_and_exported,
        "If all layers are on one device. The layers run as one mini-batch.",
        **ALONE,
    ),
    tool(
        "`torch.jit.trace` and `torch.export` of `model[:]`",
        layers_alone,
        "The layers run as one mini-batch.",
        **ALONE,
    ),
]
