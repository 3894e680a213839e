"""Give each task its own seed, in one of two ways that draw the same random numbers.

- `PrivateGenerator` makes the task draw from its own generator. Worker threads use it, because
  their tasks run at the same time, and all threads share the CPU's default generator.
- `SeededDefault` seeds the default generator while the task runs. Ranks use it. It takes less time,
  because it does not need to watch every operator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchgpipe.random.generators import UNLIKE, State, same
from torchgpipe.setting import ProcessSetting
from torchgpipe.tensors._autograd import (
    HigherOrderOperator,
    is_other_generator,
    pop_mode,
    push_mode,
)

DEFAULT_GENERATOR_LOCK = threading.RLock()
"""The lock to hold while the state of the CPU's default generator is set: all threads share it."""

_set_default = torch.default_generator.set_state

SET = (
    "a layer, or another thread, has set the default generator (torch.manual_seed), which all "
    "partitions share; give the layer a torch.Generator of its own, or use GPipe with "
    "engine='graph'"
)


HIGHER_ORDER = (
    "a layer calls the operator {!r}, whose functions PyTorch traces; this is not safe in several "
    "worker threads, so use engine='graph'"
)


class SeededDefault:
    """A context in which the default generator has the seed of one task.

    The task's forward and its recomputation enter the same object, so that both draw the same
    random numbers. At the end, the default generator gets back the state that it had before.

    Args:
        seed: The seed of the task.
        drew: A function that is called at the end if the task has drawn random numbers.
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
        if not same(self._begin, end):
            self._drew()
        if kind is not None:
            return
        if seed != self._seed % 2**64:
            raise RuntimeError(SET)
        if self._end is not None and not same(self._end, end):
            raise RuntimeError(UNLIKE)
        self._end = end


class _Thread(threading.local):
    private: PrivateGenerator | None = None


_thread = _Thread()


class PrivateGenerator(TorchDispatchMode):
    """A context in which operators draw random numbers from a private generator with a given seed.

    So the numbers of a task do not depend on what other threads draw at the same time.

    An operator that has an argument `generator` gets the private generator, unless a layer passes
    another generator. A few random operators have no such argument. While such an operator runs,
    the default generator has the state of the private generator. A lock allows this in only one
    thread at a time.

    As with `SeededDefault`, the task's forward and its recomputation enter the same object.

    Args:
        seed: The seed of the private generator.
        drew: A function that is called each time an operator draws.
        exchanged: A function that is called before each collective operation (of
            `torch.distributed`).
    """

    supports_higher_order_operators = True  # to refuse them in a line of its own

    def __init__(
        self,
        seed: int,
        drew: Callable[[], None],
        exchanged: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed % 2**64
        self._generator = torch.Generator()
        self._drew, self._drawn = drew, False
        self._end: State | None = None
        self.exchanged = exchanged

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tell PyTorch that compiled layers may run while this dispatch mode is active.

        Without this method, PyTorch would refuse to run compiled layers. With it, compiled layers
        draw their random numbers from the private generator, as other layers do.
        """
        return True

    @staticmethod
    def present() -> PrivateGenerator | None:
        """Return the innermost private generator of the current thread, if there is one."""
        return _thread.private

    @staticmethod
    def back_to(outer: PrivateGenerator | None) -> None:
        """Make `outer` the innermost private generator of the current thread again.

        This is needed after Ctrl-C, which can skip the end of an inner generator's context.
        The caller must also restore the thread's dispatch modes.
        """
        _thread.private = outer

    def __enter__(self) -> PrivateGenerator:
        self._default_seed = _default_seed()
        self._generator.manual_seed(self._seed)
        self._outer, _thread.private = _thread.private, self
        push_mode(self)
        return self

    def __exit__(self, *error: Any) -> None:
        pop_mode()
        _thread.private = self._outer
        if error[0] is not None:
            return
        seed, end = self._generator.initial_seed(), self._generator.get_state()
        if seed != self._seed:
            torch.default_generator.manual_seed(seed)
            if self._drawn:
                raise RuntimeError(SET)
        elif self._drawn and self._end is not None and not same(self._end, end):
            raise RuntimeError(UNLIKE)
        self._end = end

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            raise RuntimeError(HIGHER_ORDER.format(func.__name__))
        kind = _kind(func)
        # An operator on a DTensor may exchange its parts, and this would not see that.
        if kind == "exchanges" or any(hasattr(each, "full_tensor") for each in types):
            self.exchanged()
        # Where such contexts are nested, only the innermost acts.
        quiet = kind in ("quiet", "exchanges")
        if quiet or is_other_generator(kwargs.get("generator")) or _thread.private is not self:
            return func(*args, **kwargs)
        if kind == "draws for dropout":
            at, p = next(
                (i, a) for i, a in enumerate(func._schema.arguments) if a.name == "dropout_p"
            )
            if not (args[at] if at < len(args) else kwargs.get(p.name, p.default_value)):
                return func(*args, **kwargs)
        self._drew()
        self._drawn = True
        # Read without the lock first: only where the seeds differ does it need another look.
        if torch.default_generator.initial_seed() != self._default_seed != _default_seed():
            raise RuntimeError(SET)
        if kind == "takes a generator":
            return func(*args, **{**kwargs, "generator": self._generator})
        with DEFAULT_GENERATOR_LOCK:
            default = torch.default_generator.get_state()
            _set_default(self._generator.get_state())
            try:
                return func(*args, **kwargs)
            finally:
                self._generator.set_state(torch.default_generator.get_state())
                _set_default(default)


@cache
def _kind(func: Any) -> str:
    if "c10d" in func.namespace or func.namespace == "_dtensor":
        return "exchanges"
    if any(a.name == "generator" and a.kwarg_only for a in func._schema.arguments):
        return "takes a generator"
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return "quiet"
    return (
        "draws for dropout"
        if any(a.name == "dropout_p" for a in func._schema.arguments)
        else "draws by default"
    )


class _OfThisThread:
    """An object that acts as the private generator of the thread that uses the object.

    In a thread without a private generator, the object acts as the default generator.
    """

    def __getattr__(self, name: str) -> Any:
        private = _thread.private
        return getattr(torch.default_generator if private is None else private._generator, name)


ASKING_PRIVATE_GENERATORS = ProcessSetting(
    lambda: torch.default_generator,
    lambda g: vars(torch.random).update(default_generator=g),
    _OfThisThread(),
)
"""A context in which functions such as `torch.get_rng_state` use a task's private generator.

The other functions are `set_rng_state`, `fork_rng` and `manual_seed`.
"""


def _default_seed() -> int:
    # The lock is needed: for a short time, the default generator can have another thread's state.
    with DEFAULT_GENERATOR_LOCK:
        return torch.default_generator.initial_seed()
