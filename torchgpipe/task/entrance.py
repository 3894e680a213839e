"""The ends of a task's autograd graph: a node for its inputs, and gradient edges of its outputs."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from torchgpipe.task.guards.parameters import TOKEN
from torchgpipe.tensors._autograd import is_batched
from torchgpipe.tensors.microbatch import Flat, carrying


def entered(inputs: Flat, needs: tuple[bool, ...], input_grads: list[Tensor | None]) -> Flat:
    """Return the inputs as outputs of a new autograd node.

    In backward, the node writes the gradients of the inputs into the list `input_grads`. The node
    refers to this list, and not to the task. Otherwise the node and the task would keep each other
    alive.

    Args:
        inputs: The inputs.
        needs: Whether each input requires grad. If none does, no node is made.
        input_grads: The list for the gradients.
    """
    if True not in needs:
        return leaves(inputs, needs)
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
        outputs = leaves(inputs, needs)
        mark(ctx, outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        ctx.input_grads[:] = grads
        return None, None, None, None


def refuse_unusual_backward(grads: Flat) -> None:
    """Raise `RuntimeError` if the backward in progress is of a kind that tasks do not support.

    Unsupported are batched gradients (`is_grads_batched=True`) and `create_graph=True`.
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
    """Mark those of a node's outputs that do not require grad as not differentiable."""
    if others := [y for y in outputs if y is not None and not y.requires_grad]:
        ctx.mark_non_differentiable(*others)


def leaves(tensors: Flat, needs: Iterable[bool]) -> Flat:
    """Return detached tensors; `needs` says which of them require grad."""
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
    """Return the edges that have a gradient, and these gradients.

    `edges` can be empty: if there is no gradient at all, a checkpointed task is not recomputed, and
    so it has no graph.
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
    """Raise a clearer error in place of PyTorch's error that a graph is already freed.

    PyTorch's error occurs if several micro-batches use the same tensor that has a graph. The
    backward of the first of these micro-batches frees the tensor's graph.
    """
    if "through the graph a second time" in str(error):
        raise RuntimeError(
            f"layers of partition {partition} use the same tensor in several micro-batches, but "
            "the first backward frees the tensor's autograd graph; make this tensor a buffer, or "
            "compute it in the layer's forward"
        ) from error
