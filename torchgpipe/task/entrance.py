"""Both ends of a task's graph: the entrance node, and the edges of the outputs."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from torchgpipe.task.guards.parameters import TOKEN
from torchgpipe.tensors._autograd import is_batched
from torchgpipe.tensors.microbatch import Flat, carrying


def entered(inputs: Flat, needs: tuple[bool, ...], input_grads: list[Tensor | None]) -> Flat:
    """Return the inputs as the begin of a graph; their gradients come into `input_grads`.

    The node holds this list. If it held the task, each would keep the other alive.
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
    """Raise `RuntimeError` if the backward in progress is one that tasks cannot follow."""
    if any(grad is not None and is_batched(grad) for grad in grads):
        raise RuntimeError(
            "the pipeline's backward cannot take several gradients at once (is_grads_batched=True, "
            "jacobian(vectorize=True)), as its tasks have graphs of their own; ask for one after "
            "the other"
        )
    if torch.is_grad_enabled():
        raise RuntimeError(
            "the pipeline's backward cannot be differentiated again (create_graph=True), as its "
            "tasks have graphs of their own; use the layers without a pipeline for that"
        )


def mark(ctx: Any, outputs: Iterable[Tensor | None]) -> None:
    """Let those outputs of a node take a gradient that say so by `requires_grad`."""
    if others := [y for y in outputs if y is not None and not y.requires_grad]:
        ctx.mark_non_differentiable(*others)


def leaves(tensors: Flat, needs: Iterable[bool]) -> Flat:
    """Return the same data without its graph; let those take a gradient that `needs` says."""
    found = [None if x is None else x.detach() for x in tensors]
    for x, leaf, n in zip(tensors, found, needs, strict=True):
        if x is not None and leaf is not None:
            if n:
                leaf.requires_grad_()
            if x.__dict__:
                carrying(leaf, x)
    return tuple(found)


def all_none(grads: Flat) -> bool:
    """Return whether there is no gradient."""
    return not [g for g in grads if g is not None]


def used(
    edges: Sequence[GradientEdge | None], grads: Flat
) -> tuple[list[GradientEdge], list[Tensor]]:
    """Return the edges whose outputs have gradients, and these gradients.

    Where there is no gradient, a checkpointed task may have no edges.
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
    """Raise a clearer error, if this one comes from a graph that micro-batches have in common."""
    if "through the graph a second time" in str(error):
        raise RuntimeError(
            f"layers of partition {partition} use a tensor in several micro-batches that has one "
            "graph for all, as it was made outside of them; make it a buffer, or in the layer's "
            "forward"
        ) from error
