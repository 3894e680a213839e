"""The nodes of the caller's autograd graph that the graph engine makes: tasks and recomputations.

The docstring of graph.py has a picture of how the nodes are connected.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchgpipe.task.entrance import all_none, mark, refuse_unusual_backward
from torchgpipe.task.guards.modes import SetBackOnFailure
from torchgpipe.task.task import TaskGraph
from torchgpipe.task.where import note_task, shorten
from torchgpipe.tensors import accelerator
from torchgpipe.tensors._autograd import backward_id, keeps_graph, let_gradients_go_forward
from torchgpipe.tensors.copy import StreamFence
from torchgpipe.tensors.item import Item
from torchgpipe.tensors.microbatch import Flat, Form


@dataclass(slots=True, eq=False, kw_only=True)
class FencedTask(TaskGraph):
    """A task that is a node of the caller's graph, with its stream and its fences.

    Attributes:
        stream: The stream of the task; `None` on devices without streams.
        inputs_fence: The fence (which makes streams wait for each other) for copies of the inputs.
        outputs_fence: The fence for copies of the outputs.
        inside: The context in which a backward runs; it counts the threads that run partitions.
        output_form: The form of the output.
    """

    stream: torch.Stream | None
    inputs_fence: StreamFence
    outputs_fence: StreamFence
    inside: AbstractContextManager[object]
    output_form: Form = Tensor

    def recompute_now(self) -> None:
        """Recompute this task during the current backward, if it is checkpointed."""
        self.guards.backward_begins(backward_id())
        if self.checkpoint:
            # The node of a recomputation has only one input: a tie (an empty CPU tensor that orders
            # nodes). So autograd does not choose the task's GPU stream for this node. Choose the
            # stream here.
            with accelerator.using(self.stream), SetBackOnFailure(), self.inside:
                try:
                    self.recompute(keep=keeps_graph())
                except Exception as error:
                    self.note(error, "recomputation")
                    raise

    def note(self, error: Exception, doing: str) -> None:
        """Add to an error a note about the task in which it was raised; shorten its traceback."""
        note_task(error, f"{doing} of micro-batch {self.i}", self.stage.index, self.stage.partition)
        shorten(error)


_BEFORE_INPUTS = 6
"""How many arguments of `TaskNode` come before the inputs of the task."""


class TaskNode(torch.autograd.Function):
    """A node of the caller's graph whose forward and backward run a task."""

    @staticmethod
    def forward(  # noqa: PLR0913 - each input of a node is an argument
        ctx: Any,
        task: FencedTask,
        item: Item,
        tied: bool,
        gate: Tensor,
        before: Tensor | None,
        source: Tensor | None,
        *inputs: Tensor | None,
    ) -> Flat:
        """Run the task's forward, and connect this node with other nodes of the graph.

        The arguments `gate`, `before` and `source` only make edges of the graph, which force an
        order of the backwards. Two of them are ties. A tie is an empty tensor that a task returns
        only so that another node can take it as an input.

        Args:
            ctx: The node.
            task: The task.
            item: The inputs, with all that the task needs to know about them.
            tied: Whether the task returns a tie after its outputs.
            gate: The output of the gate of the stage's parameters.
            before: The tie of the previous task on this stage.
            source: The tie of the task that has computed the inputs.
            inputs: The tensors of `item`.
        """
        ctx.task, ctx.tied = task, tied
        ctx.set_materialize_grads(False)
        task.inputs_fence.arrive(inputs)
        # The setting lasts until this function ends.
        let_gradients_go_forward(True)
        outputs, task.output_form = task.forward(item)  # the tensors of `item` are `inputs`
        task.outputs_fence.leave()
        mark(ctx, outputs)
        return (*outputs, torch.empty(0, device="cpu")) if tied else outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run the task's backward, after its recomputation if that has not run yet."""
        refuse_unusual_backward(grads)
        task, grads = ctx.task, grads[:-1] if ctx.tied else grads
        task.check_unspent()
        if all_none(grads):
            task.guards.backward_begins(backward_id())
        else:
            task.recompute_now()
        task.outputs_fence.arrive(grads)
        with task.inside:
            try:
                input_grads = task.backward(grads, keep=keeps_graph())
            except Exception as error:
                task.note(error, "backward")
                raise
        task.inputs_fence.leave()
        return (*[None] * _BEFORE_INPUTS, *input_grads)


class Recomputation(torch.autograd.Function):
    """A node of the caller's graph whose backward recomputes a task.

    The node passes on the task's tie: an empty tensor that only orders nodes.
    """

    @staticmethod
    def forward(ctx: Any, task: FencedTask, tie: Tensor) -> Tensor:
        """Return the tie unchanged, because this node does its work in its backward.

        Args:
            ctx: The node.
            task: The task that `backward` recomputes.
            tie: An empty tensor that the task returns only to connect this node with the task.
        """
        ctx.set_materialize_grads(False)
        ctx.task = task
        return tie.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None]:
        """Recompute the task."""
        refuse_unusual_backward(grads)
        ctx.task.recompute_now()
        return None, None
