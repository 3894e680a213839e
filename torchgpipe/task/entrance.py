"""The entrance of a task: a node that cuts its graph off from the caller's graph.

There the gradients of the inputs are taken off.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from torchgpipe.task.guards.parameters import TOKEN
from torchgpipe.tensors.microbatch import Flat, carrying


def entered(inputs: Flat, needs: tuple[bool, ...], input_grads: list[Tensor | None]) -> Flat:
    """Return the inputs as the begin of a graph; their gradients come into `input_grads`."""
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


def refuse_create_graph() -> None:
    """Raise `RuntimeError` if the backward in progress shall be differentiated again."""
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
