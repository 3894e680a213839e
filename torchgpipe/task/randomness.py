"""Random numbers of a task: its recomputation draws what its first pass drew (GPipe paper, section 2.3).

Generators that one thread uses at a time are set back to the states that they had before the first pass. Workers draw
at once, and the CPU's default generator is one for all threads. So a worker's task draws from a private generator
instead, with a seed of its own (seeds.py). A rank's task draws from the default generator, put into that state.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from ctypes import string_at
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchgpipe.tensors._autograd import pop_mode, present_mode, push_mode
from torchgpipe.tensors.observe import NOTHING

DEFAULT_GENERATOR_LOCK = threading.RLock()
"""Held by whoever sets the state of a default generator, which all threads share."""

_setting_back = threading.RLock()

SET = (
    "a layer, or another thread, has set the default generator (torch.manual_seed), which all partitions share; give "
    "the layer a torch.Generator of its own, or use GPipe with engine='graph'"
)

UNLIKE = (
    "a recomputation drew more or fewer random numbers than its first pass: a layer draws otherwise in it, or another "
    "thread drew from the same generator; give that thread a torch.Generator of its own"
)


def default_generators(device: torch.device) -> list[torch.Generator]:
    """Return the generators that layers on `device` draw from by default."""
    if device.type in ("cpu", "meta"):
        return [torch.default_generator]
    return [torch.default_generator, torch.get_device_module(device).default_generators[device.index]]


def own_generators(modules: Iterable[nn.Module]) -> list[torch.Generator]:
    """Return the generators that are attributes of layers."""
    return [value for m in modules for value in m.__dict__.values() if type(value) is torch.Generator]


def check_apart(generators: Iterable[Sequence[torch.Generator]]) -> None:
    """Raise `RuntimeError` if partitions, whose own generators are given, have one in common."""
    distinct = [g for own in generators for g in set(own)]
    if len(set(distinct)) < len(distinct):
        raise RuntimeError(
            "several partitions draw from one torch.Generator, and not in the order in which the layers would; give "
            "each layer a generator of its own"
        )


State = Tensor | tuple[int, int]


@dataclass(slots=True)
class Randomness:
    """Wrap the two passes of a task so that both draw the same random numbers.

    `generators` are set back for the second pass. `private` returns a context in which each pass runs, if given, and
    `guard` one for the backward.
    """

    generators: Sequence[torch.Generator] = ()
    private: Callable[[], AbstractContextManager[object]] | None = None
    guard: Callable[[], AbstractContextManager[object]] | None = None
    _states: Sequence[State] = ()
    _ends: Sequence[State] = ()
    _present: Sequence[State] = ()

    def first(self) -> AbstractContextManager[object]:
        """Return what to enter around the first pass, now."""
        self._states = [_state(g) for g in self.generators]
        return NOTHING if self.private is None else self.private()

    def ended(self) -> None:
        """Note that the first pass is over. The generators from which nothing was drawn are left alone from now on."""
        ends = [_state(g) for g in self.generators]
        drawn = [(g, a, b) for g, a, b in zip(self.generators, self._states, ends, strict=True) if not _same(a, b)]
        self.generators, self._states, self._ends = zip(*drawn, strict=True) if drawn else ((), (), ())

    def again(self) -> AbstractContextManager[object]:
        """Return what to enter around the recomputation."""
        if self.private is None and len(self.generators) < 2:
            return self if self.generators else NOTHING
        return self._both()

    def backward(self) -> AbstractContextManager[object]:
        """Return what to enter around the layers' backward."""
        return NOTHING if self.guard is None else self.guard()

    @contextmanager
    def _both(self) -> Iterator[None]:
        # Autograd may recompute for several devices at once, each in a thread; the CPU's generator is one for all.
        one_at_a_time = _setting_back if len(self.generators) > 1 else NOTHING
        with one_at_a_time, self, NOTHING if self.private is None else self.private():
            yield

    def __enter__(self) -> None:
        self._present = [_state(g) for g in self.generators]
        for g, state in zip(self.generators, self._states, strict=True):
            _set(g, state)

    def __exit__(self, kind: object, *_: object) -> None:
        alike = all([_same(_state(g), end) for g, end in zip(self.generators, self._ends, strict=True)])
        for g, state in zip(self.generators, self._present, strict=True):
            _set(g, state)
        if kind is None and not alike:
            raise RuntimeError(UNLIKE)


def _state(g: torch.Generator) -> State:
    # A device's generator counts, so that two numbers are all of its state, and no tensor has to be made.
    return g.get_state() if g.device.type == "cpu" else (g.initial_seed(), g.get_offset())


def _same(a: State, b: State) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):  # no operator on tensors, which would count as a task's
        return string_at(a.data_ptr(), a.nbytes) == string_at(b.data_ptr(), b.nbytes)
    return a == b


def _set(g: torch.Generator, state: State) -> None:
    if isinstance(state, Tensor):
        g.set_state(state)
    else:
        g.manual_seed(state[0])
        g.set_offset(state[1])


class SeededDefault:
    """Let a task draw from the default generator, with a seed of the task's own; enter it around both passes.

    Afterwards the generator is as it was before. `drew` is called then, if there was a draw. A private generator would
    cost time at every operator.
    """

    def __init__(self, seed: int, drew: Callable[[], None]) -> None:
        self._seed, self._drew = seed, drew
        self._end: State | None = None

    def __enter__(self) -> None:
        with DEFAULT_GENERATOR_LOCK:
            self._outer = torch.default_generator.get_state()
            self._begin = torch.default_generator.manual_seed(self._seed).get_state()

    def __exit__(self, kind: object, *_: object) -> None:
        with DEFAULT_GENERATOR_LOCK:
            seed, end = torch.default_generator.initial_seed(), torch.default_generator.get_state()
            torch.default_generator.set_state(self._outer)
        if not _same(self._begin, end):
            self._drew()
        if kind is not None:
            return
        if seed != self._seed % 2**64:
            raise RuntimeError(SET)
        if self._end is not None and not _same(self._end, end):
            raise RuntimeError(UNLIKE)
        self._end = end


class _Thread(threading.local):
    private: PrivateGenerator | None = None


_thread = _Thread()


class PrivateGenerator(TorchDispatchMode):
    """Let every operator that draws random numbers draw from one generator, of this context's own.

    Operators that accept a generator are given it. The few that do not run, one at a time, with the default
    generator put into the private one's state. `drew` is called at each draw. An operator to which a layer gives a
    generator is left alone.
    """

    _kinds: dict[Any, str] = {}  # noqa: RUF012 (a cache that all instances share)

    def __init__(self, seed: int, drew: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._default_seed = _default_seed()
        self._generator = torch.Generator()
        self._generator.manual_seed(seed)
        self._drew = drew

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let layers be compiled within this context; what is compiled still draws from it."""
        return True

    @staticmethod
    def in_use() -> bool:
        """Return whether the running thread is within such a context."""
        return _thread.private is not None

    @staticmethod
    def present() -> PrivateGenerator | None:
        """Return the innermost such context that the running thread is within."""
        return _thread.private

    @staticmethod
    def back_to(outer: PrivateGenerator | None) -> None:
        """Leave all such contexts within `outer`, one of them perhaps halfway left already."""
        while (inner := _thread.private) is not outer and inner is not None:
            if present_mode() is inner:
                pop_mode()
            _thread.private = inner._outer

    def __enter__(self) -> PrivateGenerator:
        self._outer, _thread.private = _thread.private, self
        push_mode(self)
        return self

    def __exit__(self, *error: Any) -> None:
        pop_mode()
        _thread.private = self._outer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = self._kinds.get(func) or self._classify(func)
        # With nested generators, only the innermost acts.
        if kind == "quiet" or kwargs.get("generator") is not None or _thread.private is not self:
            return func(*args, **kwargs)
        if kind == "draws for dropout" and not _argument(func, "dropout_p", args, kwargs):
            return func(*args, **kwargs)
        self._drew()
        # First without the lock, which is rarely needed.
        if torch.default_generator.initial_seed() != self._default_seed != _default_seed():
            raise RuntimeError(SET)
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
            attention = any(a.name == "dropout_p" for a in func._schema.arguments)
            kind = "draws for dropout" if attention else "draws by default"
        else:
            kind = "quiet"
        cls._kinds[func] = kind
        return kind


def _argument(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return what an operator is given for the argument of that name, or else its default."""
    at, argument = next((i, a) for i, a in enumerate(func._schema.arguments) if a.name == name)
    return args[at] if at < len(args) else kwargs.get(name, argument.default_value)


def _default_seed() -> int:
    # Another thread may have the state of a private generator in the default one for a moment.
    with DEFAULT_GENERATOR_LOCK:
        return torch.default_generator.initial_seed()


def in_turn(defaults: Sequence[torch.Generator], own: Sequence[torch.Generator], *, recomputed: bool) -> Randomness:
    """Return the random numbers of a task whose mini-batch runs in one thread: those of the generators as they are.

    `defaults` are those of the task's device, and `own` the layers'. `recomputed` says whether the task will run twice.
    """
    if not PrivateGenerator.in_use():
        return Randomness([*defaults, *own] if recomputed else ())
    # A pipeline among the layers of a worker: the worker's generator is gone in backward. So the inner tasks have
    # generators of their own. Their seeds are drawn in each pass, so that both passes of the outer task draw alike.
    seed = int(torch.randint(2**62, (), device="cpu"))
    return Randomness(own if recomputed else (), lambda: PrivateGenerator(seed, lambda: None))


def within_plain_checkpoint() -> bool:
    """Return whether the caller is a layer within `torch.utils.checkpoint`."""
    plain = sys.modules.get("torch.utils.checkpoint")
    frame = sys._getframe() if plain is not None else None
    while frame is not None:
        if frame.f_code.co_filename == plain.__file__:  # type: ignore[union-attr]
            return True
        frame = frame.f_back
    return False
