"""A segment: one task's piece of the autograd graph, cut off from the rest at both ends.

    inputs ─▶ Entrance ─▶ layers ─▶ edges of the outputs

The segment's backward starts at the edges, with the outputs' gradients, and ends at the entrance, where the inputs'
gradients are taken off; parameters' gradients accumulate on the way. Between a segment's forward and its backward
nothing holds the inputs or outputs but the layers that saved them. A checkpointed segment keeps its inputs instead,
and builds its graph, on leaves in place of the entrance, only in the recomputation (GPipe paper, section 2.3). That is
a step of its own, so that it can start before the gradient arrives (torchgpipe paper, section 3.2.3).

Because segments are apart, their backwards can run in different threads at once; whoever holds them decides when.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from torchgpipe._autograd import run_backward
from torchgpipe.ambient import Ambient
from torchgpipe.checkpoint import checkpointing, recomputing
from torchgpipe.dependency import differentiable
from torchgpipe.randomness import Randomness
from torchgpipe.stage import Flat, Stage

__all__ = ["Needs", "Segment", "all_none", "detached"]

Needs = tuple[bool, ...]
"""Which of the tensors beside it take a gradient."""


class Segment:
    """The task of one micro-batch on `stage`, checkpointed or not."""

    __slots__ = (
        "_ambient", "_arity", "_edges", "_input_grads", "_kept", "_leaves", "_randomness", "_spent", "_stage",
        "checkpoint",
    )  # fmt: skip

    def __init__(self, stage: Stage, *, checkpoint: bool, ambient: Ambient, randomness: Randomness) -> None:
        self.checkpoint = checkpoint
        self._stage = stage
        self._ambient = ambient
        self._randomness = randomness
        self._kept: tuple[Flat, bool, Needs] | None = None
        self._edges: tuple[GradientEdge | None, ...] | None = None
        self._arity = 0
        self._spent = False
        # Apart from the segment, so that the graph, which the segment holds, does not hold the segment.
        self._input_grads: list[Tensor | None] = []
        self._leaves: Flat | None = None

    def forward(self, inputs: Flat, atomic: bool, needs: Needs) -> tuple[Flat, bool, Needs]:
        """Run the layers; return outputs that have no graph, and say which of them take a gradient."""
        self._arity = len(inputs)
        if self.checkpoint and (any(needs) or self._stage.trainable()):
            return self._first_pass(inputs, atomic, needs)
        self.checkpoint = False
        with torch.enable_grad(), self._randomness.first():
            return self._build(self._entered(inputs, needs), atomic)

    @property
    def awaits_recomputation(self) -> bool:
        """Whether this is a checkpointed task whose graph is not there."""
        return self._kept is not None and self._edges is None

    def recompute(self, *, keep: bool = False) -> None:
        """Build the graph of a checkpointed task by running its layers a second time.

        Without `keep` it is the last time: the inputs are let go of, but for those that the layers save.
        """
        if self._kept is None or self._edges is not None:
            return
        inputs, atomic, needs = self._kept
        with (
            torch.enable_grad(),
            self._ambient.autocast(),
            recomputing(),
            self._stage.running_statistics_left_alone(),
            self._randomness.again(),
        ):
            if keep or len(inputs) == 1:
                # Leaves cost less than an entrance. They hold the inputs, but a single one is mostly saved anyway.
                leaves = detached(inputs)
                for x, need in zip(leaves, needs, strict=True):
                    if need and x is not None:
                        x.requires_grad_()
                self._leaves = leaves
                self._build(leaves, atomic)
            else:
                self._build(self._entered(detached(inputs), needs), atomic)
        if not keep:
            self._kept = None

    def backward(self, grads: Flat, *, keep: bool = False) -> Flat:
        """Accumulate the parameters' gradients; return those of the inputs, `None` where there is none.

        With `keep`, the segment can go backward again.
        """
        if self._spent:
            raise RuntimeError(
                "the pipeline was already gone through backward and its activations are freed; "
                "pass retain_graph=True to the first backward to go through it twice"
            )
        if self._input_grads:
            self._input_grads.clear()
        if not all_none(grads):
            self.recompute(keep=keep)
            assert self._edges is not None
            roots = [(e, g) for e, g in zip(self._edges, grads, strict=True) if e is not None and g is not None]
            if roots:
                run_backward([e for e, _ in roots], [g for _, g in roots], keep_graph=keep and not self.checkpoint)
        input_grads = self._take_input_grads()
        if self.checkpoint or not keep:
            self._edges = None
        if not keep:
            self._kept, self._spent = None, True
        return input_grads

    def _take_input_grads(self) -> Flat:
        if self._leaves is not None:
            grads = tuple([None if x is None else x.grad for x in self._leaves])
            self._leaves = None
            return grads
        if self._input_grads:
            grads = tuple(self._input_grads)
            self._input_grads.clear()
            return grads
        return (None,) * self._arity

    def _first_pass(self, inputs: Flat, atomic: bool, needs: Needs) -> tuple[Flat, bool, Needs]:
        versions = _versions(inputs)
        without_grad = torch.no_grad() if torch.is_grad_enabled() else _AS_IT_IS
        with without_grad, self._ambient.autocast(), checkpointing(), self._randomness.first():
            outputs, out_atomic = self._stage.run(inputs, atomic)
        if _versions(inputs) != versions:
            raise RuntimeError(
                f"partition {self._stage.index} changed its input in place, so recomputing it from that input would "
                "give something else; make its first layer out-of-place (inplace=False) or use checkpoint='never'"
            )
        self._kept = (inputs, atomic, needs)
        need = {id(x): n for x, n in zip(inputs, needs, strict=True)}
        out_needs = tuple([need.get(id(y), y is not None and differentiable(y)) for y in outputs])
        return detached(outputs), out_atomic, out_needs

    def _entered(self, inputs: Flat, needs: Needs) -> Flat:
        if not any(needs):
            return inputs
        entered: Flat = _Entrance.apply(self._input_grads, needs, _token, *inputs)
        return entered

    def _build(self, inputs: Flat, atomic: bool) -> tuple[Flat, bool, Needs]:
        outputs, out_atomic = self._stage.run(inputs, atomic)
        out_needs = tuple([y is not None and y.requires_grad for y in outputs])
        self._edges = tuple(
            [get_gradient_edge(y) if n and y is not None else None for y, n in zip(outputs, out_needs, strict=True)]
        )
        return detached(outputs), out_atomic, out_needs


_AS_IT_IS = nullcontext()

# Connects an entrance to a graph although its inputs have none; takes no gradient itself.
_token = torch.empty(0, requires_grad=True)


class _Entrance(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input_grads: list[Tensor | None], needs: Needs, token: Tensor, *inputs: Tensor | None
    ) -> Flat:
        ctx.input_grads = input_grads
        ctx.set_materialize_grads(False)
        outputs = detached(inputs)
        ctx.mark_non_differentiable(*(y for y, n in zip(outputs, needs, strict=True) if y is not None and not n))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        ctx.input_grads[:] = grads
        return (None,) * (3 + len(grads))


def detached(tensors: Flat) -> Flat:
    """Return the same data without its graph."""
    return tuple([None if x is None else x.detach() for x in tensors])


def all_none(grads: Flat) -> bool:
    """Return whether there is no gradient."""
    for g in grads:  # noqa: SIM110 (called for every task, and a generator would cost more than all of this)
        if g is not None:
            return False
    return True


def _versions(inputs: Flat) -> list[int]:
    return [x._version for x in inputs if x is not None and not x.is_inference()]
