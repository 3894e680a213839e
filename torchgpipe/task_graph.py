"""The graph of one task: its piece of the autograd graph, cut off from the rest at both ends.

    inputs ─▶ entrance ─▶ layers ─▶ edges of the outputs
                            ▲
    leaves of the parameters

Backward through it starts at the edges, with the outputs' gradients. It ends at the entrance, where the inputs'
gradients are taken off, and at the leaves, which add up the parameters' gradients over all tasks of a mini-batch.
Between forward and backward nothing holds the inputs or outputs but the layers that saved them.

A checkpointed task keeps its inputs instead, and builds its graph only in the recomputation (GPipe paper, section 2.3).
That is a step of its own, so that it can start before the gradient arrives (torchgpipe paper, section 3.2.3).

Graphs that are apart can go backward in different threads at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from torchgpipe._autograd import caches_parametrizations, run_backward
from torchgpipe.alias import Shared, versions
from torchgpipe.ambient import Ambient
from torchgpipe.checkpoint import checkpointing, recomputing
from torchgpipe.contents import Buffers, Contents
from torchgpipe.observe import NOTHING
from torchgpipe.parameters import BY_ANOTHER_WAY
from torchgpipe.randomness import Randomness
from torchgpipe.stage import Flat, Stage

Needs = tuple[bool, ...]
"""Which of the tensors beside it take a gradient."""


class TaskGraph:
    """Forward, recomputation and backward of one micro-batch on `stage`, whose layers hold `contents`."""

    __slots__ = (
        "_ambient", "_arity", "_buffers", "_contents", "_edges", "_input_grads", "_kept", "_leaves", "_randomness",
        "_spent", "_stage", "_versions", "checkpoint",
    )  # fmt: skip

    def __init__(
        self, stage: Stage, contents: Contents, ambient: Ambient, randomness: Randomness, *, checkpoint: bool
    ) -> None:
        self.checkpoint = checkpoint
        self._stage = stage
        self._contents = contents
        self._ambient = ambient
        self._randomness = randomness
        self._kept: tuple[Flat, bool, Needs] | None = None
        self._versions: list[int | None] = []
        self._buffers: Buffers = ()
        self._edges: list[GradientEdge | None] | None = None
        self._arity = 0
        self._spent = False
        # Apart from this object, so that the graph, which this object holds, does not hold it.
        self._input_grads: list[Tensor | None] = []
        self._leaves: Flat | None = None

    def forward(self, inputs: Flat, atomic: bool, needs: Needs, shared: Shared) -> tuple[Flat, bool, Needs]:
        """Run the layers; return outputs that have no graph, and say which of them take a gradient."""
        _check_not_cached()
        self._arity = len(inputs)
        if self.checkpoint and (any(needs) or self._contents.leaves.parameters):
            return self._first_pass(inputs, atomic, needs, shared)
        self.checkpoint = False
        with torch.enable_grad(), self._randomness.first():
            outputs, out_atomic = self._build(self._entered(inputs, needs), atomic, shared)
        assert self._edges is not None
        return detached(outputs), out_atomic, tuple([edge is not None for edge in self._edges])

    @property
    def awaits_recomputation(self) -> bool:
        """Whether this is a checkpointed task whose graph is not there."""
        return self._kept is not None and self._edges is None

    def recompute(self, *, keep: bool = False) -> None:
        """Build the graph of a checkpointed task by running its layers a second time.

        Without `keep` it is the last time: the inputs are let go of, but for those that the layers save.

        Raises:
            RuntimeError: what the layers would meet is not what they met in the first pass.
        """
        if self._kept is not None and self._edges is None:
            # A copy, as other threads may recompute at the same time.
            self._ambient.context.copy().run(self._recompute, *self._kept, keep)

    def _recompute(self, inputs: Flat, atomic: bool, needs: Needs, keep: bool) -> None:
        _check_not_cached()
        if versions(inputs) != self._versions:
            raise RuntimeError(
                f"an input of partition {self._stage.index} was changed in place after its forward, so a recomputation "
                "would start from other values; do not change inputs before backward(), and make a layer that does "
                "so out-of-place (inplace=False), or use checkpoint='never'"
            )
        in_place = atomic and self._contents.begins_in_place
        with (
            self._contents.lock,
            torch.enable_grad(),
            self._ambient.again(),
            recomputing(),
            self._contents.second_pass(self._buffers),
            self._randomness.again(),
        ):
            if (keep or len(inputs) == 1) and not in_place:
                # Leaves cost less than an entrance. They hold the inputs, but a single one is mostly saved anyway.
                self._leaves = detached(inputs)
                for x, need in zip(self._leaves, needs, strict=True):
                    if need and x is not None:
                        x.requires_grad_()
                self._build(self._leaves, atomic)
            else:
                self._build(self._entered(copied(inputs) if in_place else inputs, needs), atomic)
        if not keep:
            self._kept = None

    def backward(self, grads: Flat, *, keep: bool = False) -> Flat:
        """Add the parameters' gradients to the leaves; return those of the inputs, `None` where there is none.

        With `keep`, the task can go backward again.
        """
        if self._spent:
            raise RuntimeError(
                "the pipeline was already gone through backward and its activations are freed; "
                "pass retain_graph=True to the first backward to go through it twice"
            )
        if self._input_grads:
            raise RuntimeError(BY_ANOTHER_WAY)
        if not all_none(grads):
            self.recompute(keep=keep)
            assert self._edges is not None
            roots = [(e, g) for e, g in zip(self._edges, grads, strict=True) if e is not None and g is not None]
            if roots:
                # Within the leaves, too: a layer may run again in backward, by torch.utils.checkpoint.
                with self._contents.lock, self._contents.leaves.in_place():
                    try:
                        run_backward(
                            [e for e, _ in roots], [g for _, g in roots], keep_graph=keep and not self.checkpoint
                        )
                    except BaseException:
                        # Another try needs another graph, if that can be had.
                        self._edges = None if self.checkpoint else self._edges
                        raise
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

    def _first_pass(self, inputs: Flat, atomic: bool, needs: Needs, shared: Shared) -> tuple[Flat, bool, Needs]:
        self._versions = versions(inputs)
        # Without the caller's graph: a layer may put hooks on its input.
        given = detached(inputs)
        in_place = atomic and self._contents.begins_in_place
        if in_place:
            given = copied(given)
        with (
            torch.no_grad() if torch.is_grad_enabled() else NOTHING,
            self._ambient.for_first_pass(),
            checkpointing(),
            self._contents.first_pass() as self._buffers,
            self._randomness.first(),
        ):
            outputs, out_atomic = self._stage.run(given, atomic, shared)
        self._contents.leaves.check_unchanged(self._stage.index, forward=True)
        if versions(inputs) != self._versions:
            raise RuntimeError(
                f"partition {self._stage.index} changed its input in place, so recomputing it from that input would "
                "give something else; make its first layer out-of-place (inplace=False) or use checkpoint='never'"
            )
        self._kept = (inputs, atomic, needs)
        # What is handed on unchanged takes a gradient if it did before.
        unchanged = {id(x): n for x, n in zip(given, needs, strict=True)}
        if in_place and given[0] is not None and given[0]._version:
            del unchanged[id(given[0])]
        out_needs = tuple([unchanged.get(id(y), y is not None and differentiable(y)) for y in outputs])
        return detached(outputs), out_atomic, out_needs

    def _entered(self, inputs: Flat, needs: Needs) -> Flat:
        if True not in needs:
            return detached(inputs)
        entered: Flat = _Entrance.apply(self._input_grads, needs, inputs, _token)
        return entered

    def _build(self, inputs: Flat, atomic: bool, shared: Shared = ()) -> tuple[Flat, bool]:
        with self._contents.lock, self._contents.leaves.in_place():
            outputs, out_atomic = self._stage.run(inputs, atomic, shared)
        self._edges = [None if y is None or not y.requires_grad else _edge(y) for y in outputs]
        return outputs, out_atomic


def _edge(y: Tensor) -> GradientEdge:
    return get_gradient_edge(y) if y.grad_fn is None else GradientEdge(y.grad_fn, y.output_nr)


# Connects an entrance to a graph although its inputs have none; takes no gradient itself.
_token = torch.empty(0, requires_grad=True)


class _Entrance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input_grads: list[Tensor | None], needs: Needs, inputs: Flat, token: Tensor) -> Flat:
        ctx.input_grads = input_grads
        ctx.set_materialize_grads(False)
        outputs = detached(inputs)
        if False in needs:
            ctx.mark_non_differentiable(*(y for y, n in zip(outputs, needs, strict=True) if y is not None and not n))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        ctx.input_grads[:] = grads
        return None, None, None, None


def _check_not_cached() -> None:
    if caches_parametrizations():
        raise RuntimeError(
            "torch.nn.utils.parametrize.cached() keeps a weight for all micro-batches, but each needs a graph of its "
            "own; call the pipeline and backward() outside of it, or under torch.no_grad()"
        )


def refuse_create_graph() -> None:
    """Raise `RuntimeError` if the backward in progress shall be differentiated again."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "the pipeline's backward cannot be differentiated again (create_graph=True), as its tasks have graphs of "
            "their own; use the layers without a pipeline for that"
        )


def differentiable(x: Tensor) -> bool:
    """Return whether a tensor of this type can take a gradient."""
    return x.is_floating_point() or x.is_complex()


def detached(tensors: Flat) -> Flat:
    """Return the same data without its graph."""
    return tuple([None if x is None else x.detach() for x in tensors])


def copied(inputs: Flat) -> Flat:
    """Return a copy of the micro-batch, which is a single tensor, beside the skips."""
    assert inputs[0] is not None
    return (inputs[0].detach().clone(), *inputs[1:])


def all_none(grads: Flat) -> bool:
    """Return whether there is no gradient."""
    for g in grads:  # noqa: SIM110 (called for every task, and a generator would cost more than all of this)
        if g is not None:
            return False
    return True
