"""Make the recomputation of a task draw the same random numbers as its forward.

What goes wrong without this guard: a dropout layer draws another mask in the recomputation than in
the forward. So the gradients do not belong to the output of the forward.

Section 2.3 of the GPipe paper describes recomputation. engine/seeds.py says from which generator
each task draws.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import string_at

import torch
from torch import Tensor, nn

from torchgpipe.task.guards.guard import Context, Guard, GuardedTask
from torchgpipe.tensors.observe import NOTHING

_one_at_a_time = threading.RLock()

UNLIKE = (
    "a recomputation drew more or fewer random numbers than its first pass: a layer draws "
    "otherwise in it, or another thread drew from the same generator; give that thread a "
    "torch.Generator of its own"
)


def default_generators(device: torch.device) -> list[torch.Generator]:
    """Return the generators that layers on `device` draw from by default."""
    if device.type in ("cpu", "meta"):
        return [torch.default_generator]
    return [
        torch.default_generator,
        torch.get_device_module(device).default_generators[device.index],
    ]


def own_generators(modules: Iterable[nn.Module]) -> list[torch.Generator]:
    """Return the `torch.Generator`s that are attributes of the modules."""
    found: list[torch.Generator] = []
    for module in modules:
        found += [value for value in module.__dict__.values() if type(value) is torch.Generator]
    return found


def check_apart(generators: Iterable[Sequence[torch.Generator]]) -> None:
    """Raise `RuntimeError` if two partitions share a generator.

    Args:
        generators: For each partition, the generators that are attributes of its layers.
    """
    distinct: list[torch.Generator] = []
    for own in generators:
        distinct += set(own)
    if len(set(distinct)) < len(distinct):
        raise RuntimeError(
            "several partitions draw from the same torch.Generator, so they would draw in another "
            "order than layers without a pipeline; give each layer its own generator"
        )


State = Tensor | tuple[int, int]
"""The state of a generator; on a GPU the seed and the offset.

Seed and offset can be read without waiting for the GPU.
"""

MakeContext = Callable[[], Context]


class Randomness(Guard):
    """The guard that makes a task's recomputation draw the random numbers of its forward.

    Args:
        generators: The generators that the layers may draw from. The recomputation sets them to the
            states that they had before the forward.
        around: A function that returns the context in which the layers run, or `None`.
        around_backward: A function that returns the context in which the layers' backward runs, or
            `None`.
    """

    def __init__(
        self,
        generators: Sequence[torch.Generator] = (),
        around: MakeContext | None = None,
        around_backward: MakeContext | None = None,
    ) -> None:
        self.generators = generators
        self._around = around
        self._around_backward = around_backward
        self._before: Sequence[State] = ()
        self._after: Sequence[State] = ()

    def around(self) -> Context:
        """Return the context in which the layers run."""
        return NOTHING if self._around is None else self._around()

    def before_single_pass(self, task: GuardedTask) -> Context | None:
        """Return the context for the forward of a task that is not recomputed."""
        return None if self._around is None else self._around()

    def before_first_pass(self, task: GuardedTask) -> Context | None:
        """Record the states of the generators; return the context for the task's forward."""
        self._before = [state_of(g) for g in self.generators]
        return None if self._around is None else self._around()

    def after_first_pass(self, task: GuardedTask, outputs: object) -> None:
        """Forget the generators from which the layers have not drawn random numbers."""
        generators, starts, ends = [], [], []
        for generator, start in zip(self.generators, self._before, strict=True):
            end = state_of(generator)
            if not same(start, end):
                generators.append(generator)
                starts.append(start)
                ends.append(end)
        self.generators, self._before, self._after = generators, starts, ends

    def before_recomputation(self, task: GuardedTask) -> Context | None:
        """Return the context for the recomputation."""
        if self.generators:
            return self._as_in_first()
        return None if self._around is None else self._around()

    def before_backward(self, task: GuardedTask) -> Context | None:
        """Return the context for the layers' backward."""
        return None if self._around_backward is None else self._around_backward()

    @contextmanager
    def _as_in_first(self) -> Iterator[None]:
        """Within this context, generators have the states that they had before the task's forward.

        At the end of the context, their states must be the same as after the forward. Otherwise,
        the recomputation has drawn other random numbers, and `RuntimeError` is raised.
        """
        # Autograd may recompute for several devices at the same time, each in its own thread. These
        # threads share the CPU's generator, so they have to take turns.
        alone = _one_at_a_time if len(self.generators) > 1 else NOTHING
        with alone, self.around():
            present = [state_of(g) for g in self.generators]
            try:
                _set_all(self.generators, self._before)
                yield
                ends = [state_of(g) for g in self.generators]
            finally:
                _set_all(self.generators, present)
            for end, expected in zip(ends, self._after, strict=True):
                if not same(end, expected):
                    raise RuntimeError(UNLIKE)


def state_of(g: torch.Generator) -> State:
    """Return a generator's state now."""
    return g.get_state() if g.device.type == "cpu" else (g.initial_seed(), g.get_offset())


def same(a: State, b: State) -> bool:
    """Return whether two states of a generator are equal.

    No tensor operator is called, because modes and profilers would see it as a part of the task.
    """
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return string_at(a.data_ptr(), a.nbytes) == string_at(b.data_ptr(), b.nbytes)
    return a == b


def _set_all(generators: Sequence[torch.Generator], states: Sequence[State]) -> None:
    for g, state in zip(generators, states, strict=True):
        if isinstance(state, Tensor):
            g.set_state(state)
        else:
            g.manual_seed(state[0])
            g.set_offset(state[1])
