"""What all guards have in common: the moments at which a task, or a mini-batch, calls them.

A guard looks after one thing that both passes of a task must meet alike, or that must not leak from
task to task. It belongs to one stage, or one task, in one mini-batch.

    the mini-batch begins      the guard is made
    before a pass              `before_single_pass`, `before_first_pass`, `before_recomputation`
    after a pass               `after_first_pass`, `after_recomputation`
    all forwards have ended    `after_all_forwards`
    the backward begins        `backward_begins`
    before a task's backward   `before_backward`
    the step has ended         `ended`

A guard overrides the moments at which it has something to do, and is not called at the others. What
a `before_…` returns is a context for the layers, which are run in the contexts of all guards. The
docs' page on how it works has a table of guards and moments.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from torchgpipe.tensors.microbatch import Flat, Form

Context = AbstractContextManager[object]
Before = Literal[
    "before_single_pass", "before_first_pass", "before_recomputation", "before_backward"
]


@dataclass(slots=True, eq=False)
class GuardedTask:
    """What guards see of a task (task.py).

    Attributes:
        randomness: The guard of the task's own random numbers.
        inputs: The inputs of a checkpointed task, until its last recomputation.
        form: The class of the micro-batch that enters.
        needs: Which inputs take a gradient.
        with_graph: Whether the first pass makes a graph.
        found: Which outputs take a gradient, according to the latest graph.
        claimed: Which outputs take a gradient, according to the first pass.
        noted: What each guard has noted of the first pass.
    """

    randomness: Guard
    inputs: Flat | None = field(default=None, kw_only=True)
    form: Form = field(default=Tensor, kw_only=True)
    needs: tuple[bool, ...] = field(default=(), kw_only=True)
    with_graph: bool = field(default=True, kw_only=True)
    found: list[bool] = field(default_factory=list, kw_only=True)
    claimed: list[bool] = field(default_factory=list, kw_only=True)
    noted: dict[Guard, Any] = field(default_factory=dict, kw_only=True)


class Guard:
    """The base of guards, which does nothing at any moment.

    A guard keeps what it notes of a task in `task.noted[self]`.
    """

    def before_single_pass(self, task: GuardedTask) -> Context | None:
        """Prepare for the only pass of a task that is not checkpointed."""

    def before_first_pass(self, task: GuardedTask) -> Context | None:
        """Prepare for the first pass of a checkpointed task; note what its second pass needs."""

    def after_first_pass(self, task: GuardedTask, outputs: Flat) -> None:
        """Check what the layers have done, and note more. Not called if the layers have failed."""

    def before_recomputation(self, task: GuardedTask) -> Context | None:
        """Put back what was noted, or refuse the recomputation."""

    def after_recomputation(self, task: GuardedTask, outputs: Flat) -> None:
        """Check that the layers have done the same. Not called if the layers have failed."""

    def before_backward(self, task: GuardedTask) -> Context | None:
        """Prepare for the backward of the layers, which may run layers again."""

    def after_all_forwards(self) -> None:
        """Check what the layers have done in the forwards of the mini-batch."""

    def backward_begins(self) -> None:
        """Check that nothing was changed between forward and backward."""

    def ended(self) -> None:
        """Check what the layers have done, after a whole step."""


class Nested:
    """Several contexts as one: entered in their order, and left in the opposite order."""

    def __init__(self, contexts: Sequence[Context]) -> None:
        self._contexts = contexts

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for context in self._contexts:
                stack.enter_context(context)
            self._entered = stack.pop_all()

    def __exit__(self, *error: object) -> bool | None:
        return self._entered.__exit__(*error)  # type: ignore[arg-type]
