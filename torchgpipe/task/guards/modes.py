"""Run worker threads and recomputations in the modes of the caller's code, such as autocast.

A guard is needed for this, because in PyTorch each thread has its own modes.

What goes wrong without this guard: the model is called within autocast, and backward() is called
outside of autocast. The layers should compute in bfloat16. But worker threads and recomputations
would compute in float32.

Worker threads enter all modes of the caller. A recomputation restores only those modes of the
forward that may differ in its thread. Most often there are none.

What it costs: each recomputation compares the modes of its thread with those of the forward. A
worker thread enters all modes of the caller once in a run. If autocast is on, each recomputation
casts the parameters again. In `step` and `evaluate`, and with worker threads, each forward does so,
too, and its graph keeps its own casts until the backward.
"""

from __future__ import annotations

import contextvars
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from torchgpipe.random.seeded import PrivateGenerator
from torchgpipe.task.guards.guard import Context, Guard, GuardedTask
from torchgpipe.tensors._autograd import (
    NO_MODES,
    DeviceContext,
    Stacks,
    mode_stacks,
    set_mode_stacks,
    torch_function_enabled,
    with_torch_function,
)
from torchgpipe.tensors.accelerator import WITH_AUTOCAST
from torchgpipe.tensors.checkpoint import CheckpointPhase, is_checkpointing, is_recomputing
from torchgpipe.tensors.observe import NOTHING

RUNNING: contextvars.ContextVar[tuple[object, ...]] = contextvars.ContextVar("running", default=())
"""The pools of threads (`Workers`) that run the current code.

There are several if a pipeline is a layer of another pipeline.
"""


class AmbientModes(Guard):
    """The guard that runs worker threads and recomputations in the modes of the caller's code.

    In PyTorch, each thread has its own modes. So without this guard, a worker thread would compute
    in float32, for example, although the user calls the pipeline within autocast. The guard records
    these modes of the thread that creates the guard:

    - grad mode and inference mode
    - autocast and the default dtype
    - each `TorchFunctionMode` (such as the default device) and each `TorchDispatchMode`
    - whether `__torch_function__` is enabled
    - whether this pipeline is inside a first pass or a recomputation of an outer pipeline

    A recomputation does not enter a `TorchFunctionMode` or `TorchDispatchMode` in two cases: if the
    mode's attributes have changed while the layers ran, or if its class has `only_watches = True`,
    which says that the mode changes no results.

    Args:
        devices: The devices of the partitions.
        threads: Whether several threads run in these modes at the same time.

    Attributes:
        grad: Whether gradients are on.
        casts: Whether autocast is on.
        watched: The modes whose attributes may change, each with its attributes at the beginning.
        changed: The modes whose attributes have changed. It is empty until all layers have run.
    """

    def __init__(self, devices: Iterable[torch.device], *, threads: bool = False) -> None:
        self.grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = {}
        # Layers on other devices may compute on the CPU, too.
        for kind in kinds_of(devices):
            self._autocast[kind] = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        self.casts = any(enabled for enabled, _ in self._autocast.values())
        self._dtype = torch.get_default_dtype()
        self._stacks = _without_private(mode_stacks())
        self.watched: list[tuple[object, object]] = []
        for modes in self._stacks:
            for mode in modes:
                if type(mode) is not DeviceContext and not _only_watches(mode):
                    self.watched.append((mode, _state(mode)))
        self.changed: Sequence[object] = ()
        self._all_have_run = False
        self._threads = threads
        self._checkpointing, self._recomputing = is_checkpointing(), is_recomputing()
        self._torch_function = torch_function_enabled()
        self._context = contextvars.copy_context()

    def context(self) -> contextvars.Context:
        """Return a copy of the caller's context variables (`contextvars`) for a recomputation.

        Each recomputation gets its own copy, because several threads may recompute at the same
        time. One variable keeps its current value: `RUNNING`, the thread pools that run the current
        code. They can be other pools than in the first pass.
        """
        context = self._context.copy()
        context.run(RUNNING.set, RUNNING.get())
        return context

    def again(self) -> Context:
        """Return a context that sets the recorded modes, such as autocast, again.

        Grad mode and inference mode are left as they are.
        """
        return self.before_recomputation() or NOTHING

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Return a context in which a worker thread has the modes of the caller's thread.

        Modes are settings that PyTorch has for each thread, such as autocast and grad mode.
        """
        phase = CheckpointPhase(checkpointing=self._checkpointing, recomputing=self._recomputing)
        inference = torch.inference_mode(self._inference)
        with inference, torch.set_grad_enabled(self.grad), phase, self.again():
            yield

    def without_autocast(self) -> Context:
        """Return a context in which autocast is off, for backwards within a `step`."""
        return without_autocast(self._autocast)

    def before_recomputation(self, task: GuardedTask | None = None) -> Context | None:
        """Return a context that sets the forward's autocast, default dtype and further modes.

        Raises:
            RuntimeError: If several threads run, and the default dtype has changed since the
                forward. Setting it back here would change it for all threads.
        """
        cast = self.casts or any(torch.is_autocast_enabled(kind) for kind in self._autocast)
        turned_off = self._torch_function and not torch_function_enabled()
        present = mode_stacks()
        # Most often there are no modes. They are then the same object, NO_MODES.
        others = present is not self._stacks and self._to_repeat(present) != self._stacks
        dtype = torch.get_default_dtype()
        if dtype != self._dtype and self._threads:
            raise RuntimeError(
                f"the default dtype was {self._dtype} in forward and is {dtype} in backward, but "
                "all threads share one default dtype; call set_default_dtype() after backward(), "
                "or use engine='graph'"
            )
        if not (cast or others or turned_off or dtype != self._dtype):
            return None
        return self._as_before(present if others else [], turned_off)

    @contextmanager
    def _as_before(self, present: Sequence[list[Any]], turned_off: bool) -> Iterator[None]:
        """Set this thread's modes to the recorded modes, within this context.

        Args:
            present: The `TorchFunctionMode`s and the `TorchDispatchMode`s of this thread. An empty
                list means that these modes are right already, and stay unchanged.
            turned_off: Whether `__torch_function__` is disabled in this thread, but was enabled
                when the modes were recorded.
        """
        with ExitStack() as stack:
            if turned_off:
                stack.enter_context(with_torch_function())
            if present:
                modes = []
                for before, now in zip(self._stacks, present, strict=True):
                    watching = [m for m in now if _only_watches(m) and m not in before]
                    modes.append([*before, *watching])
                stack.callback(set_mode_stacks, mode_stacks())
                set_mode_stacks(tuple(modes))
            dtype = torch.get_default_dtype()
            if dtype != self._dtype:
                stack.callback(torch.set_default_dtype, dtype)
                torch.set_default_dtype(self._dtype)
            for kind, (enabled, cast) in self._autocast.items():
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, cast, enabled, cache_enabled=False))
            yield

    def all_have_run(self, *, refuse: bool = False) -> None:
        """Record which `TorchFunctionMode`s and `TorchDispatchMode`s have changed their attributes.

        Args:
            refuse: Whether to raise an error if a mode has changed. This is needed if several
                threads have run layers in the mode, because they can have changed it at the same
                time.

        Raises:
            RuntimeError: If `refuse` is set, and a mode has changed its attributes.
        """
        self.changed = [mode for mode, before in self.watched if _state(mode) != before]
        self._all_have_run = True
        self._stacks = self._to_repeat(self._stacks)
        if refuse and self.changed:
            raise RuntimeError(
                f"the mode {type(self.changed[0]).__name__} around the pipeline has state, which "
                "several threads have changed at the same time; use engine='graph', or, if this "
                "mode changes only its own state and is thread-safe, write only_watches = True in "
                "its class"
            )

    def _to_repeat(self, stacks: Stacks) -> Stacks:
        """Return the `TorchFunctionMode`s and `TorchDispatchMode`s that a recomputation needs.

        Modes whose attributes have changed while the layers ran are left out. Before all layers
        have run, it is not known which modes will change, so all modes are returned.

        Args:
            stacks: The modes to choose from: two lists, one for each of the two kinds.
        """
        stacks = _without_private(stacks)
        if stacks is NO_MODES or not self._all_have_run:
            return stacks
        function_modes, operator_modes = stacks
        return self._without_changed(function_modes), self._without_changed(operator_modes)

    def _without_changed(self, modes: list[Any]) -> list[Any]:
        return [m for m in modes if not (m in self.changed or _only_watches(m))]


def kinds_of(devices: Iterable[torch.device]) -> frozenset[str]:
    """Return the types of devices whose autocast can affect layers on the given devices."""
    return WITH_AUTOCAST.intersection({"cpu", *[device.type for device in devices]})


@contextmanager
def without_autocast(kinds: Iterable[str]) -> Iterator[None]:
    """Return a context in which autocast is off for some types of devices.

    PyTorch advises to call `backward()` outside of autocast. Otherwise the backward of a product
    that is computed in float32 on purpose would run in low precision.
    """
    with ExitStack() as stack:
        for kind in kinds:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _without_private(stacks: Stacks) -> Stacks:
    if stacks is NO_MODES:
        return stacks
    function_modes, operator_modes = stacks
    return function_modes, [m for m in operator_modes if type(m) is not PrivateGenerator]


def _only_watches(mode: object) -> bool:
    return getattr(mode, "only_watches", False) is True


def _state(value: object, depth: int = 4) -> object:
    """Return the attributes of an object, such as a mode, in a form that can be compared later.

    Containers and objects are compared by their contents, but only `depth` levels deep. Deeper
    objects, and objects without attributes, are compared by identity.
    """
    if isinstance(value, int | float | str | None):
        return value
    held = [*value] if isinstance(value, list | tuple | set | deque) else []
    if not callable(value):
        named = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        held += [*named, *named.values()]
    version = value._version if isinstance(value, Tensor) and not value.is_inference() else None
    return version, [_state(x, depth - 1) for x in held] if depth and held else id(value)


class SetBackOnFailure(AbstractContextManager[None]):
    """A context that restores the modes of this thread if an exception is raised inside it.

    A mode is a setting of a thread, such as whether gradients are on. Normally, inner contexts
    restore the modes. But Ctrl-C can skip their `__exit__`.
    """

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._phase = CheckpointPhase()
        self._private = PrivateGenerator.present()
        self._stacks = mode_stacks()
        self._dtype = torch.get_default_dtype()

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            return
        torch.set_grad_enabled(self._grad)
        self._phase.__enter__()
        PrivateGenerator.back_to(self._private)
        if mode_stacks() != self._stacks:
            set_mode_stacks(self._stacks)
        torch.set_default_dtype(self._dtype)
