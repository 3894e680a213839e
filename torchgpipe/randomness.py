"""Random numbers of tasks: the recomputation of a task draws what its forward drew (GPipe paper, section 2.3).

Two ways. `SavedState` keeps the generators' states before the first pass and puts them back for the second. That
needs one task at a time: the CPU's default generator is shared by all threads. Workers run tasks at once, so there
`SeededTask` gives each task a generator of its own, seeded from the default one, the mini-batch's place in its
sequence, and the task. A task's numbers then depend on the seed alone, and not on how threads interleave.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchgpipe.effort import Effort

__all__ = ["DEFAULT_GENERATOR_LOCK", "UNSEEDED", "PrivateGenerator", "Randomness", "SavedState", "SeededTask"]


DEFAULT_GENERATOR_LOCK = threading.RLock()
"""Held by whoever reads or changes the state of the CPU's default generator; twice by a pipeline in a pipeline."""


_NOTHING = nullcontext()


class Randomness(Protocol):
    """Wrap the two passes of a task so that both draw the same random numbers."""

    def first(self) -> AbstractContextManager[object]:
        """Enter around the first pass."""

    def again(self) -> AbstractContextManager[object]:
        """Enter around the recomputation."""


class SavedState:
    """Save the states of the CPU's and the device's generators, and restore them for recomputation."""

    def __init__(self, device: torch.device | None) -> None:
        """Prepare for layers on `device`; `None` where it has no generator beside the CPU's."""
        self._device = device
        self._states: tuple[Tensor, Tensor | None] | None = None

    def first(self) -> AbstractContextManager[object]:
        """Save the states before the first pass."""
        self._states = self._get()
        return _NOTHING

    def again(self) -> AbstractContextManager[object]:
        """Put the saved states back for the recomputation, and the present ones after it."""
        return self

    def __enter__(self) -> None:
        assert self._states is not None
        if self._device is not None:
            # Devices' recomputations may run in threads of the autograd engine at once.
            DEFAULT_GENERATOR_LOCK.acquire()
        self._present = self._get()
        self._set(self._states)

    def __exit__(self, *_: object) -> None:
        self._set(self._present)
        if self._device is not None:
            DEFAULT_GENERATOR_LOCK.release()

    def _get(self) -> tuple[Tensor, Tensor | None]:
        if self._device is None:
            return torch.default_generator.get_state(), None
        return torch.default_generator.get_state(), torch.get_device_module(self._device).get_rng_state(self._device)

    def _set(self, states: tuple[Tensor, Tensor | None]) -> None:
        torch.default_generator.set_state(states[0])
        if self._device is not None:
            torch.get_device_module(self._device).set_rng_state(states[1], self._device)


class SeededTask:
    """Draw a task's random numbers from a generator seeded with `seed`; call `drew` at each draw.

    `effort`, where there is one, counts the operators of the first pass.
    """

    def __init__(self, seed: int, drew: Callable[[], None], effort: Effort | None = None) -> None:
        self._seed = seed
        self._drew = drew
        self._effort = effort

    def first(self) -> AbstractContextManager[object]:
        """Enter a generator with the task's seed around the first pass."""
        return PrivateGenerator(self._seed, self._drew, self._effort)

    def again(self) -> AbstractContextManager[object]:
        """Enter a generator with the task's seed around the recomputation."""
        return PrivateGenerator(self._seed, self._drew)


class _Unseeded:
    """Leave random numbers alone, in tasks that are known to draw none."""

    def first(self) -> AbstractContextManager[object]:
        return _NOTHING

    again = first


UNSEEDED = _Unseeded()


class PrivateGenerator(TorchDispatchMode):
    """Let every operator that draws random numbers draw from one generator, of this context's own.

    Operators that accept a generator are given it. The few that do not run, one at a time, with the default
    generator put into the private one's state. `drew` is called at each draw.
    """

    _kinds: dict[Any, str] = {}  # noqa: RUF012 (a cache that all instances share)

    def __init__(self, seed: int, drew: Callable[[], None], effort: Effort | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = torch.Generator()
        self._generator.manual_seed(seed)
        self._drew = drew
        self._effort = effort

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = self._run(func, args, kwargs)
        if self._effort is not None:
            self._effort.add(func, args, kwargs, out)
        return out

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        kind = self._kinds.get(func) or self._classify(func)
        if kind == "quiet" or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        self._drew()
        if kind == "takes a generator":
            return func(*args, **{**kwargs, "generator": self._generator})
        with DEFAULT_GENERATOR_LOCK:
            default = torch.get_rng_state()
            torch.set_rng_state(self._generator.get_state())
            try:
                return func(*args, **kwargs)
            finally:
                self._generator.set_state(torch.get_rng_state())
                torch.set_rng_state(default)

    @classmethod
    def _classify(cls, func: Any) -> str:
        if any(a.name == "generator" and a.kwarg_only for a in func._schema.arguments):
            kind = "takes a generator"
        elif torch.Tag.nondeterministic_seeded in func.tags:
            kind = "draws by default"
        else:
            kind = "quiet"
        cls._kinds[func] = kind
        return kind
