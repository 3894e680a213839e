"""How one task draws random numbers, such that its recomputation draws those of its first pass (GPipe paper, 2.3).

What goes wrong without it: a dropout draws another mask in the recomputation: gradients of another output.

engine/seeds.py says which task draws in which way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from ctypes import string_at
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchgpipe.tensors.observe import NOTHING

_one_at_a_time = threading.RLock()

UNLIKE = (
    "a recomputation drew more or fewer random numbers than its first pass: a layer draws otherwise in it, or another "
    "thread drew from the same generator; give that thread a torch.Generator of its own"
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
    """Return the generators that are attributes of layers."""
    return [
        value for m in modules for value in m.__dict__.values() if type(value) is torch.Generator
    ]


def check_apart(generators: Iterable[Sequence[torch.Generator]]) -> None:
    """Raise `RuntimeError` if partitions, whose own generators are given, have one in common."""
    distinct = [g for own in generators for g in set(own)]
    if len(set(distinct)) < len(distinct):
        raise RuntimeError(
            "several partitions draw from one torch.Generator, and not in the order in which the layers would; give "
            "each layer a generator of its own"
        )


State = Tensor | tuple[int, int]
"""A generator's state: on a device its seed and its offset, which are read without waiting for the device."""

MakeContext = Callable[[], AbstractContextManager[object]]


@dataclass(slots=True)
class Randomness:
    """What one task's passes are run in, so that both draw the same random numbers.

    `generators` are set back, for the recomputation, to the states that they had before the first pass. `around` makes
    a context for each pass, and `around_backward` one for the layers' backward; `None` if there is no need.
    """

    generators: Sequence[torch.Generator] = ()
    around: MakeContext | None = None
    around_backward: MakeContext | None = None
    _before: Sequence[State] = ()
    _after: Sequence[State] = ()

    def first(self) -> AbstractContextManager[object]:
        """Note the generators' states now; return what to enter around the first pass."""
        self._before = [state_of(g) for g in self.generators]
        return NOTHING if self.around is None else self.around()

    def ended(self) -> None:
        """Note that the first pass is over. The generators from which nothing was drawn are left alone from now on."""
        after = [state_of(g) for g in self.generators]
        drawn = [
            (g, a, b)
            for g, a, b in zip(self.generators, self._before, after, strict=True)
            if not same(a, b)
        ]
        self.generators, self._before, self._after = (
            zip(*drawn, strict=True) if drawn else ((), (), ())
        )

    def again(self) -> AbstractContextManager[object]:
        """Return what to enter around the recomputation."""
        if not self.generators:
            return NOTHING if self.around is None else self.around()
        return self._as_in_first()

    def backward(self) -> AbstractContextManager[object]:
        """Return what to enter around the layers' backward."""
        return NOTHING if self.around_backward is None else self.around_backward()

    @contextmanager
    def _as_in_first(self) -> Iterator[None]:
        """Set the generators back to where the first pass began; raise `RuntimeError` if it ended elsewhere."""
        # Autograd may recompute for several devices at once, each in a thread; the CPU's generator is one for all.
        alone = _one_at_a_time if len(self.generators) > 1 else NOTHING
        with alone, NOTHING if self.around is None else self.around():
            present = [state_of(g) for g in self.generators]
            try:
                _set_all(self.generators, self._before)
                yield
                ends = [state_of(g) for g in self.generators]
            finally:
                _set_all(self.generators, present)
            if not all(map(same, ends, self._after)):
                raise RuntimeError(UNLIKE)


def state_of(g: torch.Generator) -> State:
    """Return a generator's state now."""
    return g.get_state() if g.device.type == "cpu" else (g.initial_seed(), g.get_offset())


def same(a: State, b: State) -> bool:
    """Return whether two states are equal, without an operator on tensors, which would count as a task's."""
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
