"""A task's segment as one node of the caller's autograd graph, for the engines that have such a graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchgpipe._autograd import accumulates, keeps_graph
from torchgpipe.copy import using
from torchgpipe.observe import Observer, observed
from torchgpipe.segment import Segment, all_none, detached
from torchgpipe.stage import Flat

__all__ = ["TaskNode", "check_backward", "guarded"]


@dataclass(slots=True)
class TaskNode:
    """The segment of task (i, j), run on `stream` where it is on a CUDA device; `atomic` as in `Stage.run`.

    The node of a task whose outputs are the pipeline's (`last`) is the first that backward reaches: it refuses the
    kinds of backward that segments cannot serve, before any task is consumed.
    """

    segment: Segment
    observer: Observer | None
    i: int
    j: int
    atomic: bool
    last: bool
    stream: torch.cuda.Stream | None = None

    def run(self, inputs: Flat, tie: Tensor | None = None) -> Flat:
        """Run the task and return its outputs; a phony as `tie` orders the node as `join` would order its input."""
        outputs: Flat = _Segment.apply(self, _token if tie is None else tie, *inputs)
        return outputs

    def recompute(self) -> None:
        """Run the layers of a checkpointed task again, unless that was done."""
        if not self.segment.awaits_recomputation:
            return
        # Autograd runs nodes whose tensors are on the CPU with whatever streams backward() was called on.
        with using(self.stream), observed(self.observer, "recompute", self.i, self.j):
            self.segment.recompute(keep=keeps_graph())


# Makes every task part of the graph, also where only parameters take gradients.
_token = torch.empty(0, requires_grad=True)


class _Segment(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, node: TaskNode, tie: Tensor, *inputs: Tensor | None) -> Flat:
        ctx.node = node
        ctx.tied = tie is not _token
        ctx.set_materialize_grads(False)
        if not node.segment.checkpoint:
            inputs = detached(inputs)  # a checkpointed one runs without a graph now, and cuts it off later
        with observed(node.observer, "forward", node.i, node.j):
            outputs, node.atomic, needs = node.segment.forward(inputs, node.atomic, ctx.needs_input_grad[2:])
        if False in needs:
            ctx.mark_non_differentiable(*(y for y, n in zip(outputs, needs, strict=True) if y is not None and not n))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        node: TaskNode = ctx.node
        if node.last:
            check_backward()
        if node.segment.awaits_recomputation and not all_none(grads):
            node.recompute()
        with observed(node.observer, "backward", node.i, node.j):
            input_grads = node.segment.backward(grads, keep=keeps_graph())
        return (None, torch.empty(0) if ctx.tied else None, *input_grads)


class _Guard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Flat:
        ctx.set_materialize_grads(False)
        return detached(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        check_backward()
        return grads


def guarded(values: Sequence[tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
    """Return the outputs of tasks that are no nodes, such that they, too, refuse what the others' nodes refuse."""
    outputs = [y for flat in values for y in flat if y.requires_grad]
    if not outputs:
        return list(values)
    through = iter(_Guard.apply(*outputs))
    return [tuple(next(through) if y.requires_grad else y for y in flat) for flat in values]


def check_backward() -> None:
    """Refuse the kinds of backward that a task with a graph of its own cannot serve; raise `RuntimeError`."""
    if not accumulates():
        raise RuntimeError(
            "the pipeline accumulates into its parameters' .grad, so it cannot serve torch.autograd.grad(…) or "
            "backward(inputs=…); call loss.backward() and read .grad"
        )
    if torch.is_grad_enabled():
        raise RuntimeError("the pipeline's backward cannot be differentiated again (create_graph=True)")
