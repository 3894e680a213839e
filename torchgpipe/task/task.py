"""A task: micro-batch i on a stage. Its graph is a piece of the autograd graph, cut off from the rest at both ends.

    inputs ─▶ entrance ─▶ layers ─▶ edges of the outputs
                            ▲
    stand-ins for the parameters

Backward through it starts at the edges, with the outputs' gradients. It ends at the entrance, where the inputs'
gradients are taken off, and at the stand-ins, where the parameters' gradients add up over all tasks of a mini-batch.
Between forward and backward, inputs and outputs are kept only if a layer has saved them for its backward.

A checkpointed task keeps its inputs instead, and builds its graph only in the recomputation (GPipe paper, section 2.3).
That is a step of its own, so that it can start before the gradient arrives (torchgpipe paper, section 3.2.3).

    forward      the layers run on the inputs; outputs are handed on without their graph
    recompute    the layers run on the same inputs once more, now with a graph
    backward     from the outputs' gradients to those of the inputs and the stand-ins
    weights      what backward has left for later

What both passes have to meet alike, and what must not leak from task to task, is looked after by guards (`guards/`).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, saved_tensors_hooks

from torchgpipe.task.entrance import all_none, entered, leaves
from torchgpipe.task.guards.buffers import HeldBuffers
from torchgpipe.task.guards.gradients import able_to_take
from torchgpipe.task.guards.layers import LayerStates
from torchgpipe.task.guards.memory import KeptInputs, check_attributes, spared
from torchgpipe.task.guards.modes import WITHOUT_FAST_ATTENTION, Ambient
from torchgpipe.task.guards.parameters import BY_ANOTHER_WAY
from torchgpipe.task.guards.randomness import Randomness
from torchgpipe.task.guards.stage_guards import StageGuards
from torchgpipe.task.stage import Stage
from torchgpipe.tensors._autograd import edge_of, packs_saved_tensors, run_backward
from torchgpipe.tensors.checkpoint import CheckpointPhase
from torchgpipe.tensors.item import Shared
from torchgpipe.tensors.microbatch import Flat, Form
from torchgpipe.tensors.observe import NOTHING, Kind, Observer, observed


@dataclass(slots=True, eq=False)
class TaskGraph:
    """Forward, recomputation and backward of micro-batch `i` on `stage`, whose layers have `guards`."""

    stage: Stage
    guards: StageGuards
    ambient: Ambient
    randomness: Randomness
    i: int
    observer: Observer | None
    checkpoint: bool
    _needs: tuple[bool, ...] = ()  # which inputs take a gradient
    _claimed: list[bool] = field(default_factory=list)  # which outputs
    _kept: KeptInputs | None = None
    _shown: Flat = ()  # what the first pass has computed, if a mode may have changed that
    _buffers: HeldBuffers = field(init=False)  # before the first pass
    _layers: LayerStates = field(init=False)
    _edges: list[GradientEdge | None] | None = None
    # A list of its own: the entrance node holds it. If the node held this object, both would keep each other alive.
    _input_grads: list[Tensor | None] = field(default_factory=list)
    _later: Callable[[], None] | None = None  # the second half of a backward, after the first

    def forward(self, inputs: Flat, form: Form, shared: Shared) -> tuple[Flat, Form]:
        """Run the layers; return outputs that have no graph. By `requires_grad` they say which take a gradient."""
        self._needs = tuple([x is not None and x.requires_grad for x in inputs])
        self.checkpoint = self.checkpoint and (
            True in self._needs or bool(self.guards.parameters.by_parameter)
        )
        with observed(self.observer, "forward", self.i, self.stage.index):
            if self.checkpoint:
                return self._first_pass(inputs, form, shared)
            with torch.enable_grad(), self.randomness.first(), self.guards.lock:
                outputs, form = self._build(
                    entered(inputs, self._needs, self._input_grads), form, shared
                )
        return leaves(outputs, self._taken()), form

    def _first_pass(self, inputs: Flat, form: Form, shared: Shared) -> tuple[Flat, Form]:
        gradients = self.guards.gradients
        known = gradients.are_known(self._needs)
        watching = gradients.watching(self._needs, self.guards.parameters.ids)
        kept = KeptInputs(self.stage.index, inputs, form)
        given = spared(inputs, form) if self.guards.begins_in_place else inputs
        # Without the caller's graph: a layer may put hooks on its input, or ask whether it takes a gradient.
        given = leaves(given, self._needs)
        with self.guards.lock:
            self._buffers = self.guards.buffers.before_first_pass()
            self._layers = self.guards.layers.before_first_pass()
            with (
                torch.set_grad_enabled(not known) if torch.is_grad_enabled() == known else NOTHING,
                self.ambient.for_first_pass(),
                # Or what is around the pipeline, such as torch.utils.checkpoint, would count what this graph saves.
                saved_tensors_hooks(Tensor.detach, lambda x: x)
                if not known and packs_saved_tensors(True)
                else NOTHING,
                WITHOUT_FAST_ATTENTION if self.stage.attends else NOTHING,
                CheckpointPhase(checkpointing=True),
                self.randomness.first(),
            ):
                if known:
                    outputs, out_form = self.stage.run(given, form, shared)
                else:
                    given = entered(given, self._needs, self._input_grads)
                    outputs, out_form = self._build(given, form, shared, watching)
                self.guards.parameters.check_unchanged(self.stage.index, forward=True)
                self.guards.buffers.after_first_pass(self._buffers)
                self.randomness.ended()
        kept.after_first_pass()
        self._kept = kept
        if self.ambient.watched:
            self._shown = tuple([None if y is None else y.detach().clone() for y in outputs])
        # An output that is an input takes a gradient exactly if that input did; but not one that is changed in place.
        handed_on = {id(x): need for x, need in zip(given, self._needs, strict=True)}
        if self.guards.begins_in_place and form is Tensor:
            handed_on.pop(id(given[0]), None)
        able = able_to_take(outputs, handed_on)
        self._claimed = able if known else self._taken()
        if not known:
            gradients.learn(self._needs, self._claimed, able, watching)
        self._edges = None
        return leaves(outputs, self._claimed), out_form

    def recompute(self, *, keep: bool = False) -> None:
        """Build the graph of a checkpointed task by running its layers a second time, unless it is there.

        Without `keep` it is the last time, and inputs are let go of that the layers have not saved. Raise
        `RuntimeError` if the layers would not meet what they met in the first pass.
        """
        if self._kept is not None and self._edges is None:
            with observed(self.observer, "recompute", self.i, self.stage.index):
                # A copy, as other threads may recompute at the same time.
                self.ambient.context.copy().run(self._recompute, self._kept, keep)

    def _recompute(self, kept: KeptInputs, keep: bool) -> None:
        kept.before_recomputation()
        self.guards.parameters.check_unchanged(self.stage.index)
        inputs = spared(kept.inputs, kept.form) if self.guards.begins_in_place else kept.inputs
        with (
            self.guards.lock,
            torch.inference_mode(False) if torch.is_inference_mode_enabled() else NOTHING,
            torch.enable_grad(),
            self.ambient.again(),
            CheckpointPhase(recomputing=True),
            self.guards.layers.again(self._layers),
            self.guards.buffers.again(self._buffers),
            self.randomness.again(),
        ):
            outputs, _ = self._build(entered(inputs, self._needs, self._input_grads), kept.form)
        if self._shown:
            self.ambient.check_same(self.stage.index, self._shown, outputs)
        if self._claimed != self._taken():
            self.guards.gradients.correct(self._needs)
        if not keep:
            self._kept = None

    def _build(
        self,
        inputs: Flat,
        form: Form,
        shared: Shared = (),
        watching: AbstractContextManager[Any] = NOTHING,
    ) -> tuple[Flat, Form]:
        with self.guards.in_place(), watching:
            outputs, out_form = self.stage.run(inputs, form, shared)
        if any([y is not None and y.__dict__ for y in outputs]):
            check_attributes(self.stage.index, outputs)
        self._edges = [None if y is None or not y.requires_grad else edge_of(y) for y in outputs]
        return outputs, out_form

    def _taken(self) -> list[bool]:
        """Return which outputs take a gradient, once there is a graph."""
        return [edge is not None for edge in self._edges or ()]

    def backward(self, grads: Flat, *, keep: bool = False, kind: Kind = "backward") -> Flat:
        """Add the parameters' gradients to the stand-ins; return those of the inputs, `None` where there is none.

        With `keep`, the task can go backward again. The first half of it alone has the kind `"backward_inputs"`;
        `stage.halves` says what is left for the second.
        """
        self.check_unspent()
        if self._input_grads:
            raise RuntimeError(BY_ANOTHER_WAY)
        if self._edges is None and not all_none(grads):
            self.recompute(keep=keep)
        with observed(self.observer, kind, self.i, self.stage.index):
            # Without gradients, a checkpointed task may have no edges.
            pairs = [
                (e, g)
                for e, g in zip(self._edges or (), grads, strict=False)
                if e is not None and g is not None
            ]
            if pairs:
                run = self.stage.halves.run_inputs if kind == "backward_inputs" else run_backward
                keep_graph = keep and not self.checkpoint
                self._later = self._go_backward(
                    partial(run, *zip(*pairs, strict=True), keep_graph=keep_graph)
                )
            input_grads = tuple(self._input_grads) or (None,) * len(self._needs)
            self._input_grads.clear()
            if self.checkpoint or not keep:
                self._edges = None
            if not keep:
                self._kept = None
        return input_grads

    def check_unspent(self) -> None:
        """Raise `RuntimeError` if a backward has freed the graph."""
        if self._edges is None and self._kept is None:
            raise RuntimeError(
                "the pipeline was already gone through backward and its activations are freed; "
                "pass retain_graph=True to the first backward to go through it twice"
            )

    def backward_weights(self) -> None:
        """Do the second half of `backward`, if the first has left something: add that to the stand-ins."""
        with observed(self.observer, "backward_weights", self.i, self.stage.index):
            later, self._later = self._later, None
            if later is not None:
                self._go_backward(later)

    def _go_backward(self, run: Callable[[], Any]) -> Any:
        guards = self.guards
        buffers = guards.buffers.backward() if guards.recomputed else NOTHING
        # With the stand-ins in place: a layer may run again in backward, by torch.utils.checkpoint.
        with guards.lock, guards.in_place(), buffers, self.randomness.backward():
            try:
                return run()
            except BaseException as error:
                # The graph is half freed. A checkpointed task can build it again.
                self._edges = None if self.checkpoint else self._edges
                if "through the graph a second time" not in str(error):
                    raise
                raise RuntimeError(
                    f"layers of partition {self.stage.index} use a tensor in several micro-batches that has one graph "
                    "for all, as it was made outside of them; make it a buffer, or in the layer's forward"
                ) from error
