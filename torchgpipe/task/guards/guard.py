"""The base class of guards: its methods, and when they are called.

A checkpointed task runs its layers twice: a first pass, and a recomputation in backward. Each guard
takes care of one thing, such as the buffers. The guard makes sure that this thing is the same in
both passes, and that one task does not affect another task through it. A guard belongs to one stage
or one task, in one mini-batch. Its methods are called at these moments:

    the mini-batch begins                        the guard is made
    before and after a first pass                `before_first_pass`, `after_first_pass`
    before a forward without checkpointing       `before_single_pass`
    all forwards have ended                      `after_all_forwards`
    the backward begins                          `backward_begins`
    before and after a recomputation             `before_recomputation`, `after_recomputation`
    before a task's backward                     `before_backward`
    the step has ended                           `ended`

A guard overrides only the methods that it needs. A `before_…` method can return a context manager,
in which the layers then run. `docs/how-it-works.md` has a table of all guards and their methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor
from torch.autograd.graph import GradientEdge

from torchgpipe.tensors.microbatch import Flat, Form

Context = AbstractContextManager[object]
Before = Literal[
    "before_single_pass", "before_first_pass", "before_recomputation", "before_backward"
]


@dataclass(slots=True, eq=False)
class GuardedTask:
    """The attributes of a task that guards can read and write.

    The subclass `TaskGraph`, in task.py, adds the other attributes and the methods of a task.

    Attributes:
        randomness: The guard of the task's random numbers.
        inputs: The inputs of a checkpointed task, until its last recomputation.
        form: The form of the input micro-batch.
        needs: Whether each input requires grad.
        with_graph: Whether a first pass makes a graph. `OutputGradients` sets it.
        drew: Whether layers of the stage have drawn random numbers, in this or an earlier first
            pass of the mini-batch. `Randomness` sets it.
        graph_needs: Whether each output requires grad, according to the latest graph.
        claimed_needs: Whether each output requires grad when it is passed to the next task. Without
            a graph, this is a guess, which `graph_needs` can later contradict.
        edges: For each output, its edge in the task's graph, where a backward begins, or `None` if
            the output has no graph. `edges` is `None` while the task has no graph.
        noted: For each guard, the values that the guard has recorded in the forward.
    """

    randomness: Guard
    inputs: Flat | None = field(default=None, kw_only=True)
    form: Form = field(default=Tensor, kw_only=True)
    needs: tuple[bool, ...] = field(default=(), kw_only=True)
    with_graph: bool = field(default=True, kw_only=True)
    drew: bool = field(default=False, kw_only=True)
    graph_needs: list[bool] = field(default_factory=list, kw_only=True)
    claimed_needs: list[bool] = field(default_factory=list, kw_only=True)
    edges: list[GradientEdge | None] | None = field(default=None, kw_only=True)
    noted: dict[Guard, Any] = field(default_factory=dict, kw_only=True)


class Guard:
    """The base class of guards; its methods do nothing.

    A guard keeps one thing, such as the buffers, equal in a task's forward and recomputation. It
    stores values from the forward in `task.noted[self]`.
    """

    def before_single_pass(self, task: GuardedTask) -> Context | None:
        """Prepare for the forward of a task that is not checkpointed."""

    def before_first_pass(self, task: GuardedTask) -> Context | None:
        """Prepare for a checkpointed task's forward; record what a recomputation must restore."""

    def after_first_pass(self, task: GuardedTask, outputs: Flat) -> None:
        """Look at what the layers did in a checkpointed task's forward, right after it.

        A guard can record what the recomputation has to repeat, and raise an error if something
        cannot be repeated. This method is not called if the layers have raised an error.
        """

    def before_recomputation(self, task: GuardedTask) -> Context | None:
        """Restore what was recorded in the task's forward; raise an error if that is impossible."""

    def after_recomputation(self, task: GuardedTask, outputs: Flat) -> None:
        """Check that the recomputation did the same as the task's forward.

        This method is not called if the layers have raised an error.
        """

    def before_backward(self, task: GuardedTask) -> Context | None:
        """Prepare for a task's backward, in which `torch.utils.checkpoint` may run layers again."""

    def after_all_forwards(self) -> None:
        """Check that the layers are unchanged, when all forwards of the mini-batch have run."""

    def backward_begins(self) -> None:
        """Check that the layers have not changed between forward and backward."""

    def ended(self) -> None:
        """Check that the layers are unchanged, when a step (forwards and backwards) has ended."""


class Nested:
    """A context that enters several contexts in order, and leaves them in reverse order."""

    def __init__(self, contexts: Sequence[Context]) -> None:
        self._contexts = contexts

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for context in self._contexts:
                stack.enter_context(context)
            self._entered = stack.pop_all()

    def __exit__(self, *error: object) -> bool | None:
        return self._entered.__exit__(*error)  # type: ignore[arg-type]
