"""The two ends of a task's autograd graph: the node for its inputs, and the edges of its outputs.

Each task (a micro-batch on a stage) has a graph of its own. A backward through this graph begins at
the edges of the outputs, and ends at the node for the inputs.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from torchgpipe.task.guards.parameters import TOKEN
from torchgpipe.tensors._autograd import is_batched
from torchgpipe.tensors.microbatch import Flat, carrying


def entered(inputs: Flat, needs: tuple[bool, ...], input_grads: list[Tensor | None]) -> Flat:
    """Detach the inputs of a task, and return them as the outputs of a new autograd node.

    The task's graph begins at this node. In backward, the node writes the gradients of the inputs
    into the list `input_grads`. The node refers to this list and not to the task, because otherwise
    the node and the task would keep each other alive.

    Args:
        inputs: The inputs of the task.
        needs: Whether each input requires grad. If no input does, no node is made.
        input_grads: The list to which a backward writes the gradients.
    """
    if True not in needs:
        return as_leaves(inputs, needs)
    outputs: Flat = _Entrance.apply(input_grads, needs, inputs, TOKEN)
    return outputs


class _Entrance(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input_grads: list[Tensor | None],
        needs: tuple[bool, ...],
        inputs: Flat,
        token: Tensor,
    ) -> Flat:
        ctx.input_grads = input_grads
        ctx.set_materialize_grads(False)
        outputs = as_leaves(inputs, needs)
        mark(ctx, outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        ctx.input_grads[:] = grads
        return None, None, None, None


def refuse_unusual_backward(grads: Flat) -> None:
    """Raise `RuntimeError` if the backward in progress is of a kind that tasks do not support.

    Not supported are backwards with `is_grads_batched=True`, and backwards with
    `create_graph=True`.

    Args:
        grads: The gradients that the backward has given to a node.
    """
    if any(grad is not None and is_batched(grad) for grad in grads):
        raise RuntimeError(
            "the pipeline's backward cannot compute several gradients in one call "
            "(is_grads_batched=True, jacobian(vectorize=True)), because each of its tasks has its "
            "own graph; compute one gradient after the other"
        )
    if torch.is_grad_enabled():
        raise RuntimeError(
            "the pipeline's backward cannot be differentiated again (create_graph=True), because "
            "each of its tasks has its own graph; use the layers without a pipeline for that"
        )


def mark(ctx: Any, outputs: Iterable[Tensor | None]) -> None:
    """Tell autograd which outputs of a custom Function are not differentiable.

    These are the outputs that do not require grad.

    Args:
        ctx: The context object of the custom Function.
        outputs: The outputs of its forward.
    """
    if others := [y for y in outputs if y is not None and not y.requires_grad]:
        ctx.mark_non_differentiable(*others)


def as_leaves(tensors: Flat, needs: Iterable[bool]) -> Flat:
    """Return the tensors as leaves: detached from their autograd graphs.

    Args:
        tensors: The tensors. An entry that is `None` stays `None`.
        needs: For each tensor, whether its leaf requires grad.
    """
    found = [None if x is None else x.detach() for x in tensors]
    for x, leaf, n in zip(tensors, found, needs, strict=True):
        if x is not None and leaf is not None:
            if n:
                leaf.requires_grad_()
            if x.__dict__:
                carrying(leaf, x)
    return tuple(found)


def all_none(grads: Flat) -> bool:
    """Return whether all gradients are `None`."""
    return not [g for g in grads if g is not None]


def used(
    edges: Sequence[GradientEdge | None], grads: Flat
) -> tuple[list[GradientEdge], list[Tensor]]:
    """Return the edges at which a backward begins, and the gradients for these edges.

    Args:
        edges: For each output of a task, its gradient edge, or `None` if the output has no graph.
            The sequence is empty if the task gets no gradients, and so was not recomputed.
        grads: For each output, its gradient, or `None`.
    """
    found, given = [], []
    for edge, grad in zip(edges, grads, strict=False):
        if edge is not None and grad is not None:
            found.append(edge)
            given.append(grad)
    return found, given


SPENT = (
    "the pipeline was already gone through backward and its activations are freed; pass "
    "retain_graph=True to the first backward to go through it twice"
)


def explain(error: BaseException, partition: int) -> None:
    """If an error says that a graph is already freed, raise a clearer error in its place.

    PyTorch raises such an error if layers use a tensor that has a graph for several micro-batches.
    The first backward of a micro-batch frees the graph, and the second backward needs it.

    Args:
        error: The error that the backward of a task has raised.
        partition: The index of the task's partition.
    """
    if "through the graph a second time" in str(error):
        raise RuntimeError(
            f"layers of partition {partition} use the same tensor in several micro-batches, but "
            "the first backward frees the tensor's autograd graph; make this tensor a buffer, "
            "compute it in the layer's forward, or, if the criterion reads it from a layer, return "
            "it from the layer"
        ) from error
