"""A task: micro-batch i on a stage.

Its graph is a piece of the autograd graph, cut off at both ends.

    inputs ─▶ entrance ─▶ layers ─▶ edges of the outputs
                            ▲
    stand-ins for the parameters

Backward through it starts at the edges, with the outputs' gradients. It ends at the entrance, where
the inputs' gradients are taken off, and at the stand-ins, where the parameters' gradients add up
over all tasks of a mini-batch. Between forward and backward, inputs and outputs are kept only if a
layer has saved them for its backward.

A checkpointed task keeps its inputs instead, and builds its graph only in the recomputation (GPipe
paper, section 2.3). That is a step of its own, so that it can start before the gradient arrives
(torchgpipe paper, section 3.2.3).

Guards (`guards/`) look after what both passes have to meet alike, and what must not leak from task
to task. Here they are only told when a pass begins and ends.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from torchgpipe.task.entrance import all_none, entered, leaves
from torchgpipe.task.guards.guard import Guard
from torchgpipe.task.guards.memory import check_attributes
from torchgpipe.task.guards.parameters import BY_ANOTHER_WAY
from torchgpipe.task.guards.randomness import Randomness
from torchgpipe.task.stage import Stage
from torchgpipe.task.stage_guards import StageGuards
from torchgpipe.tensors._autograd import edge_of, run_backward
from torchgpipe.tensors.checkpoint import CheckpointPhase
from torchgpipe.tensors.item import Shared
from torchgpipe.tensors.microbatch import Flat, Form
from torchgpipe.tensors.observe import NOTHING, Kind, Observer, observed


@dataclass(slots=True, eq=False)
class TaskGraph:
    """Forward, recomputation and backward of micro-batch `i` on `stage`."""

    stage: Stage
    guards: StageGuards
    randomness: Randomness
    i: int
    observer: Observer | None
    checkpoint: bool
    inputs: Flat | None = None  # of a checkpointed task, until its last recomputation
    form: Form = Tensor
    needs: tuple[bool, ...] = ()  # which inputs take a gradient
    claimed: list[bool] = field(default_factory=list)  # which outputs take one, by the first pass
    found: list[bool] = field(default_factory=list)  # which outputs take one, in a graph
    noted: dict[Guard, Any] = field(default_factory=dict)  # what guards have noted of a first pass
    with_graph: bool = True  # whether a first pass makes a graph
    _edges: list[GradientEdge | None] | None = None
    # The entrance node holds this list. If it held the task, each would keep the other alive.
    _input_grads: list[Tensor | None] = field(default_factory=list)
    _later: Callable[[], None] | None = None  # the second half of a backward, after the first

    def forward(self, inputs: Flat, form: Form, shared: Shared) -> tuple[Flat, Form]:
        """Run the layers; return outputs without a graph, whose `requires_grad` is as with one."""
        self.form = form
        self.needs = tuple([x is not None and x.requires_grad for x in inputs])
        if not (True in self.needs or self.guards.parameters.by_parameter):
            self.checkpoint = False  # nothing will go backward
        with observed(self.observer, "forward", self.i, self.stage.index), self.guards.lock:
            if self.checkpoint:
                outputs, form = self._first_pass(inputs, shared)
            else:
                around = self.guards.around("before_single_pass", self)
                with torch.enable_grad():
                    given = entered(inputs, self.needs, self._input_grads)
                    outputs, form = self._build(given, shared, around)
                self.claimed = self.found
        return leaves(outputs, self.claimed), form

    def _first_pass(self, inputs: Flat, shared: Shared) -> tuple[Flat, Form]:
        self.inputs = inputs
        around = self.guards.around("before_first_pass", self)
        # Leaves, as a layer may put hooks on its input, or ask whether it takes a gradient.
        memory = self.guards.memory
        given = memory.given(inputs, self.form) if memory.begins_in_place else inputs
        given = leaves(given, self.needs)
        with CheckpointPhase(checkpointing=True), torch.set_grad_enabled(self.with_graph):
            if self.with_graph:
                given = entered(given, self.needs, self._input_grads)
                outputs, form = self._build(given, shared, around)
            else:
                with around:
                    outputs, form = self.stage.run(given, self.form, shared)
        self.guards.after_first_pass(self, outputs)
        self.claimed = self.guards.gradients.claim(self, given, outputs)
        self._edges = None
        return outputs, form

    def recompute(self, *, keep: bool = False) -> None:
        """Build the graph of a checkpointed task by running its layers again, unless it is there.

        Without `keep` it is the last time, and inputs are let go of that layers have not saved.

        Raises:
            RuntimeError: The layers would not meet what they met in the first pass.
        """
        if self.inputs is not None and self._edges is None:
            with observed(self.observer, "recompute", self.i, self.stage.index):
                # A copy, as other threads may recompute at the same time.
                context = self.guards.ambient.context.copy()
                context.run(self._recompute, self.inputs, keep)

    def _recompute(self, inputs: Flat, keep: bool) -> None:
        inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else NOTHING
        recomputing = CheckpointPhase(recomputing=True)
        with self.guards.lock, inference, torch.enable_grad(), recomputing:
            around = self.guards.around("before_recomputation", self)
            memory = self.guards.memory
            given = memory.given(inputs, self.form) if memory.begins_in_place else inputs
            given = entered(given, self.needs, self._input_grads)
            outputs, _ = self._build(given, (), around)
            self.guards.after_recomputation(self, outputs)
        if not keep:
            self.inputs = None

    def _build(
        self, given: Flat, shared: Shared, around: AbstractContextManager[object]
    ) -> tuple[Flat, Form]:
        """Run the layers with a graph, and keep the edges by which gradients enter it."""
        with around:
            outputs, form = self.stage.run(given, self.form, shared)
        if any(y is not None and y.__dict__ for y in outputs):
            check_attributes(self.stage.index, outputs)
        self.found = [y is not None and y.requires_grad for y in outputs]
        self._edges = []
        for y in outputs:
            self._edges.append(edge_of(y) if y is not None and y.requires_grad else None)
        return outputs, form

    def backward(self, grads: Flat, *, keep: bool = False, kind: Kind = "backward") -> Flat:
        """Add the parameters' gradients to the stand-ins; return the gradients of the inputs.

        Args:
            grads: The gradients of the outputs, `None` where there is none.
            keep: Whether the task can go backward again.
            kind: `"backward_inputs"` for the first half alone. `stage.halves` says what that leaves
                for the second half, `backward_weights`.
        """
        if self._input_grads:
            raise RuntimeError(BY_ANOTHER_WAY)
        if self._edges is None and not all_none(grads):
            self.recompute(keep=keep)
        with observed(self.observer, kind, self.i, self.stage.index):
            edges, given = [], []
            # Where there is no gradient, a checkpointed task may have no edges.
            for edge, grad in zip(self._edges or (), grads, strict=False):
                if edge is not None and grad is not None:
                    edges.append(edge)
                    given.append(grad)
            if edges:
                run = self.stage.halves.run_inputs if kind == "backward_inputs" else run_backward
                keep_graph = keep and not self.checkpoint
                self._later = self._go(partial(run, edges, given, keep_graph=keep_graph))
            input_grads = tuple(self._input_grads) or (None,) * len(self.needs)
            self._input_grads.clear()
            if self.checkpoint or not keep:
                self._edges = None
            if not keep:
                self.inputs = None
        return input_grads

    def backward_weights(self) -> None:
        """Do the second half of `backward`, if the first has left something."""
        with observed(self.observer, "backward_weights", self.i, self.stage.index):
            later, self._later = self._later, None
            if later is not None:
                self._go(later)

    def _go(self, backward: Callable[[], Any]) -> Any:
        """Go backward through the layers."""
        with self.guards.lock, self.guards.around("before_backward", self):
            try:
                return backward()
            except BaseException as error:
                # The graph is half freed. A checkpointed task can build it again.
                if self.checkpoint:
                    self._edges = None
                if "through the graph a second time" not in str(error):
                    raise
                raise RuntimeError(
                    f"layers of partition {self.stage.index} use a tensor in several micro-batches "
                    "that has one graph for all, as it was made outside of them; make it a "
                    "buffer, or in the layer's forward"
                ) from error

    def check_unspent(self) -> None:
        """Raise `RuntimeError` if a backward has freed the graph."""
        if self._edges is None and self.inputs is None:
            raise RuntimeError(
                "the pipeline was already gone through backward and its activations are freed; "
                "pass retain_graph=True to the first backward to go through it twice"
            )
