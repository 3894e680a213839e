"""A task: one micro-batch on one stage, with an autograd graph apart from the caller's graph.

    inputs ─▶ entrance ─▶ layers (with stand-ins: detached parameters) ─▶ edges of the outputs

The backward of a task starts at the edges of the outputs. It ends at the entrance (a node that
keeps the gradients of the inputs), and at the stand-ins, in which the gradients of all tasks of a
mini-batch are added up.

A checkpointed task keeps only its inputs in its forward. It builds its graph in a recomputation
(GPipe paper, 2.3; torchgpipe paper, 3.2). Guards (`guards/`) make sure that the recomputation does
the same as the forward.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchgpipe.task.entrance import SPENT, all_none, as_leaves, entered, explain, used
from torchgpipe.task.guards.guard import Context, GuardedTask
from torchgpipe.task.guards.inputs import check_attributes
from torchgpipe.task.guards.parameters import BY_ANOTHER_WAY
from torchgpipe.task.stage import Stage
from torchgpipe.task.stage_guards import StageGuards
from torchgpipe.tensors._autograd import edge_of, run_backward
from torchgpipe.tensors.checkpoint import CheckpointPhase
from torchgpipe.tensors.item import Item, Shared
from torchgpipe.tensors.microbatch import Flat, Form
from torchgpipe.tensors.observe import NOTHING, Kind, Observer, observed


@dataclass(slots=True, eq=False)
class TaskGraph(GuardedTask):
    """The forward, recomputation and backward of one task: micro-batch `i` on `stage`."""

    stage: Stage
    guards: StageGuards
    i: int
    observer: Observer | None
    checkpoint: bool
    _input_grads: list[Tensor | None] = field(default_factory=list)
    _later: Callable[[], None] | None = None  # the second half of a backward, after the first

    def forward(self, item: Item) -> tuple[Flat, Form]:
        """Run the layers on a micro-batch; return the detached outputs and the output's form.

        A detached output requires grad if the real output does.

        Args:
            item: The tensors from the previous task.
        """
        self.form = item.form
        self.needs = tuple([x is not None and x.requires_grad for x in item.flat])
        if not (True in self.needs or self.guards.parameters.by_parameter):
            self.checkpoint = False  # nothing will go backward
        with self.guards.lock, observed(self.observer, "forward", self.i, self.stage.index):
            if self.checkpoint:
                outputs, form = self._first_pass(item.flat, item.shared)
            else:
                around = self.guards.around("before_single_pass", self)
                with torch.enable_grad():
                    _, outputs, form = self._build(item.flat, item.shared, around)
                self.claimed_needs = self.graph_needs
        return as_leaves(outputs, self.claimed_needs), form

    def _first_pass(self, inputs: Flat, shared: Shared) -> tuple[Flat, Form]:
        self.inputs = inputs
        # The guard of the gradients also sets `with_graph`: whether this pass makes a graph.
        around = self.guards.around("before_first_pass", self)
        # A layer may put hooks on its input, or read its `requires_grad`.
        given = as_leaves(self.guards.inputs.for_layers(inputs, self.form), self.needs)
        with CheckpointPhase(checkpointing=True), torch.set_grad_enabled(self.with_graph):
            if self.with_graph:
                given, outputs, form = self._build(given, shared, around)
            else:
                with around:
                    outputs, form = self.stage.run(given, self.form, shared)
        self.guards.after_first_pass(self, outputs)
        self.claimed_needs = self.guards.gradients.claim(self, given, outputs)
        self.edges = None  # a graph was needed only to see which outputs require grad
        return outputs, form

    def recompute(self, *, keep: bool = False) -> None:
        """Run the layers of a checkpointed task again, which builds its graph.

        Nothing happens if the task has its graph already.

        Args:
            keep: Whether to keep the inputs, so that the task can be recomputed once more.
        """
        if self.inputs is not None and self.edges is None:
            with self.guards.lock, observed(self.observer, "recompute", self.i, self.stage.index):
                self.guards.ambient.context().run(self._recompute, self.inputs, keep)

    def _recompute(self, inputs: Flat, keep: bool) -> None:
        inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else NOTHING
        with inference, torch.enable_grad(), CheckpointPhase(recomputing=True):
            around = self.guards.around("before_recomputation", self)
            given = self.guards.inputs.for_layers(inputs, self.form)
            _, outputs, _ = self._build(given, (), around)
            self.guards.after_recomputation(self, outputs)
        if not keep:
            self.inputs = None
            self.noted.clear()

    def _build(self, inputs: Flat, shared: Shared, around: Context) -> tuple[Flat, Flat, Form]:
        """Run the layers and build the task's graph.

        Args:
            inputs: The inputs of the task.
            shared: For each input, whether it shares memory with another tensor.
            around: The context in which the layers run.

        Returns:
            The inputs that the layers got, the outputs, and the form of the output.
        """
        given = entered(inputs, self.needs, self._input_grads)
        with around:
            outputs, form = self.stage.run(given, self.form, shared)
        check_attributes(self.stage.index, outputs)
        self.graph_needs = [y is not None and y.requires_grad for y in outputs]
        self.edges = [edge_of(y) if y is not None and y.requires_grad else None for y in outputs]
        return given, outputs, form

    def backward(self, grads: Flat, *, keep: bool = False, kind: Kind = "backward") -> Flat:
        """Run the backward of the task; return the gradients of its inputs.

        The gradients of parameters are added to their stand-ins (detached parameters).

        Args:
            grads: The gradients of the outputs; `None` for an output that has none.
            keep: Whether this method can be called again.
            kind: `"backward"`, or `"backward_inputs"`, which leaves the weight gradients of matrix
                products for `backward_weights`.

        Raises:
            RuntimeError: If a backward has reached the task's inputs in another way than from its
                outputs, such as from a loss that a layer has kept.
        """
        if self._input_grads:
            raise RuntimeError(BY_ANOTHER_WAY)
        if self.edges is None and not all_none(grads):
            self.recompute(keep=keep)
        # A checkpointed task is recomputed for each backward, so its graph need not stay.
        keep_graph = keep and not self.checkpoint
        with self.guards.lock, observed(self.observer, kind, self.i, self.stage.index):
            edges, edge_grads = used(self.edges or (), grads)
            if edges:
                run = self.stage.halves.run_inputs if kind == "backward_inputs" else run_backward
                # `run_inputs` returns the second half of the backward, and `run_backward` nothing.
                self._later = self._run_guarded(
                    lambda: run(edges, edge_grads, keep_graph=keep_graph)
                )
            input_grads = tuple(self._input_grads) or (None,) * len(self.needs)
            self._input_grads.clear()
            if not keep_graph:
                self.edges = None
            if not keep:
                self.inputs = None
        return input_grads

    def backward_weights(self) -> None:
        """Compute the weight gradients that a `backward` of kind `"backward_inputs"` left out."""
        with (
            self.guards.lock,
            observed(self.observer, "backward_weights", self.i, self.stage.index),
        ):
            later, self._later = self._later, None
            if later is not None:
                self._run_guarded(later)

    def _run_guarded(self, backward: Callable[[], Any]) -> Any:
        with self.guards.around("before_backward", self):
            try:
                return backward()
            except BaseException as error:
                # A part of the graph is freed. A checkpointed task can build the graph again.
                self.edges = None if self.checkpoint else self.edges
                explain(error, self.stage.index)
                raise

    def check_unspent(self) -> None:
        """Raise `RuntimeError` if an earlier backward has freed the task's graph and inputs."""
        if self.edges is None and self.inputs is None:
            raise RuntimeError(SPENT)
