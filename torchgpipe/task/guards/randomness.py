"""Make the recomputation of a task draw the same random numbers as its forward.

What goes wrong without this guard: a dropout layer draws another mask in the recomputation than in
the forward. So the gradients do not belong to the output of the forward.

Section 2.3 of the GPipe paper describes recomputation. The file engine/seeds.py decides from which
random generator each task draws.

What it costs: each first pass reads the states of its generators twice; on a CPU, a state has 5 KB.
If the first pass has drawn random numbers, the recomputation sets the generators to these states,
and at its end back to the current states. If a task draws from a private generator, each
operator of the task is watched, so that the operator gets this generator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from torchgpipe.random.generators import UNLIKE, State, same, set_all, state_of
from torchgpipe.task.guards.guard import Context, Guard, GuardedTask
from torchgpipe.tensors.observe import NOTHING

_one_at_a_time = threading.RLock()

MakeContext = Callable[[], Context]


class Randomness(Guard):
    """The guard that makes a task's recomputation draw the same random numbers as its forward.

    Without this guard, a dropout layer, for example, would use another mask in the recomputation.

    Args:
        generators: The generators that the layers may draw from. A recomputation begins with the
            states that these generators had before the forward.
        around: A function that returns a context in which the layers have to run, such as a context
            that sets the task's seed. `None` if the layers need no context.
        around_backward: A function that returns a context for the backward of the layers, or
            `None`.
        drew: A function that returns whether the layers have drawn numbers in the context of
            `around`, from other generators than `generators`. It can be true if only earlier tasks
            of the stage have.
    """

    def __init__(
        self,
        generators: Sequence[torch.Generator] = (),
        around: MakeContext | None = None,
        around_backward: MakeContext | None = None,
        drew: Callable[[], bool] = lambda: False,
    ) -> None:
        self.generators = generators
        self._around = around
        self._around_backward = around_backward
        self._drew = drew
        self._before: Sequence[State] = ()
        self._after: Sequence[State] = ()

    def around(self) -> Context:
        """Return the context in which the layers have to run; it can give the task its own seed."""
        return NOTHING if self._around is None else self._around()

    def before_single_pass(self, task: GuardedTask) -> Context | None:
        """Return the context in which the forward draws random numbers; None if none is needed."""
        return None if self._around is None else self._around()

    def before_first_pass(self, task: GuardedTask) -> Context | None:
        """Record the generators' states, and return the context in which the forward runs.

        Later, `before_recomputation` gives the generators these states again.
        """
        self._before = [state_of(g) for g in self.generators]
        return None if self._around is None else self._around()

    def after_first_pass(self, task: GuardedTask, outputs: object) -> None:
        """Forget the generators from which the layers have not drawn random numbers.

        Also record whether the layers have drawn any random numbers.
        """
        generators, starts, ends = [], [], []
        for generator, start in zip(self.generators, self._before, strict=True):
            end = state_of(generator)
            if not same(start, end):
                generators.append(generator)
                starts.append(start)
                ends.append(end)
        self.generators, self._before, self._after = generators, starts, ends
        task.drew = bool(generators) or self._drew()

    def before_recomputation(self, task: GuardedTask) -> Context | None:
        """Return a context in which the recomputation draws the same numbers as the forward."""
        if self.generators:
            return self._as_in_first()
        return None if self._around is None else self._around()

    def before_backward(self, task: GuardedTask) -> Context | None:
        """Return the context in which the layers' backward has to run; None if none is needed."""
        return None if self._around_backward is None else self._around_backward()

    @contextmanager
    def _as_in_first(self) -> Iterator[None]:
        """Give the generators the states from before the task's forward, within this context.

        At the end of the context, the states must be the same as after the forward. If they are
        not, the recomputation has drawn other random numbers, and `RuntimeError` is raised.
        """
        # Autograd has a thread for each device, and may recompute in several of them at the same
        # time. The threads share the CPU's generator, so only one may recompute at a time.
        alone = _one_at_a_time if len(self.generators) > 1 else NOTHING
        with alone, self.around():
            present = [state_of(g) for g in self.generators]
            try:
                set_all(self.generators, self._before)
                yield
                ends = [state_of(g) for g in self.generators]
            finally:
                set_all(self.generators, present)
            for end, expected in zip(ends, self._after, strict=True):
                if not same(end, expected):
                    raise RuntimeError(UNLIKE)
