"""The modes around the caller's code, which PyTorch keeps for each thread apart.

What goes wrong without it: the call is under autocast, and backward() outside of it. A worker thread would compute in
float32, and a recomputation, too, though the first pass has computed in bfloat16.

Worker threads enter all of them; a recomputation enters those that may have changed since the first pass.
"""

import contextvars
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch import Tensor

from torchgpipe.task.guards.seeded import Everywhere, PrivateGenerator
from torchgpipe.tensors._autograd import (
    NO_MODES,
    DeviceContext,
    Stacks,
    mode_stacks,
    set_mode_stacks,
    torch_function_enabled,
    with_torch_function,
)
from torchgpipe.tensors.checkpoint import CheckpointPhase, is_checkpointing, is_recomputing
from torchgpipe.tensors.microbatch import Flat
from torchgpipe.tensors.observe import NOTHING


class Ambient:
    """Remember the modes of the thread that makes it, to enter them in another thread or at a later time.

    They are grad mode, inference mode, autocast, the default type, modes of functions (the default device is one) and
    operators, whether `__torch_function__` is on, and which pass an outer pipeline is in. `threads`: whether several
    threads meet them at once.

    A mode of functions or operators whose attributes change meanwhile has state. It may only watch (as its class may
    say by `only_watches = True`), so a recomputation leaves it out. If what layers compute depends on it, `check_same`
    finds out. `watched` are those that may have state, each with what it held at first.
    """

    def __init__(self, devices: Iterable[torch.device], *, threads: bool = False) -> None:
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        types = {"cpu", *(d.type for d in devices)} & {
            "cpu",
            "cuda",
            "xpu",
        }  # others, such as meta, have no autocast
        self._autocast = {
            t: (torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in types
        }
        self.casts = any(enabled for enabled, _ in self._autocast.values())
        self._dtype = torch.get_default_dtype()
        self._stacks = _stacks()
        modes = [m for stack in self._stacks for m in stack]
        self.watched = [
            (m, _state(m)) for m in modes if type(m) is not DeviceContext and not _only_watches(m)
        ]
        self._changed: list[object] | None = None  # until all layers have run
        self._threads = threads
        self._checkpointing, self._recomputing = is_checkpointing(), is_recomputing()
        self._torch_function = torch_function_enabled()
        self.context = contextvars.copy_context()  # which a recomputation runs in, too

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Enter all of the modes, in a worker thread."""
        passing = CheckpointPhase(checkpointing=self._checkpointing, recomputing=self._recomputing)
        with (
            torch.inference_mode(self.inference),
            torch.set_grad_enabled(self.grad),
            passing,
            self.again(),
        ):
            yield

    def for_first_pass(self) -> AbstractContextManager[object]:
        """Return what to enter around a first pass, which runs without a graph, in a thread that has the modes.

        Autocast must not cache weights there: a cast made without grad would cut later tasks off from the weight.
        """
        return self._as_before(False, False) if self.casts else NOTHING

    def again(self) -> AbstractContextManager[object]:
        """Return a context that sets autocast, the default type, and modes of functions and operators as they were.

        Raise `RuntimeError` if the default type is another one now, which other threads would meet.
        """
        cast = self.casts or any(map(torch.is_autocast_enabled, self._autocast))
        turned_off = self._torch_function and not torch_function_enabled()
        others = _stacks(self._changed) != self._stacks
        dtype = torch.get_default_dtype()
        if dtype != self._dtype and self._threads:
            raise RuntimeError(
                f"the default type was {self._dtype} in forward and is {dtype} in backward, which all threads share; "
                "call set_default_dtype() after backward(), or use engine='graph'"
            )
        anything = cast or others or dtype != self._dtype or turned_off
        return self._as_before(others, turned_off) if anything else NOTHING

    @contextmanager
    def _as_before(self, others: bool, turned_off: bool) -> Iterator[None]:
        with ExitStack() as stack:
            if turned_off:
                stack.enter_context(with_torch_function())
            if others:
                stack.callback(set_mode_stacks, mode_stacks())
                set_mode_stacks(
                    tuple(
                        [
                            *before,
                            *(mode for mode in modes if _only_watches(mode) and mode not in before),
                        ]
                        for before, modes in zip(self._stacks, mode_stacks(), strict=True)
                    )
                )
            if (dtype := torch.get_default_dtype()) != self._dtype:
                stack.callback(torch.set_default_dtype, dtype)
                torch.set_default_dtype(self._dtype)
            for device_type, (enabled, cast) in self._autocast.items():
                if enabled or torch.is_autocast_enabled(device_type):
                    stack.enter_context(
                        torch.autocast(device_type, cast, enabled, cache_enabled=False)
                    )
            yield

    def ended(self, *, refuse: bool = False) -> None:
        """Note, after all layers have run, which modes have changed; `refuse` them if several threads have done so."""
        self._changed = changed = [mode for mode, before in self.watched if _state(mode) != before]
        self._stacks = _stacks(changed, self._stacks)
        if refuse and changed:
            raise RuntimeError(
                f"{type(changed[0]).__name__} around the pipeline has state of its own, which several threads "
                "have changed at once; use engine='graph', or, if it changes nothing else and threads may do so, write "
                "only_watches = True in its class"
            )

    def check_same(self, index: int, before: Flat, again: Flat) -> None:
        """Raise `RuntimeError` if partition `index` has computed something else `again`, as a mode has changed."""
        changed = self._changed or []
        for x, y in zip(before, again, strict=False) if changed else ():
            if x is not None and y is not None and not ((x == y) | (x != x) & (y != y)).all():
                raise RuntimeError(
                    f"what partition {index} computes depends on state of {type(changed[0]).__name__} around the "
                    "pipeline, so its recomputation gives something else; use checkpoint='never'"
                )


def _only_watches(mode: object) -> bool:
    return getattr(mode, "only_watches", False) is True


def _stacks(changed: Sequence[object] | None = None, of: Stacks | None = None) -> Stacks:
    """Return the modes of this thread, or those given; once it is known which have changed, those to recompute with."""
    found = of or mode_stacks()
    return (
        found
        if found is NO_MODES
        else tuple(
            [
                m
                for m in modes
                if type(m) is not PrivateGenerator
                and (changed is None or not (m in changed or _only_watches(m)))
            ]
            for modes in found
        )
    )


def _state(value: object, depth: int = 4) -> object:
    """Return what a mode holds, such that it can be compared later; of what is not plain, which object it is."""
    if isinstance(value, int | float | str | None):
        return value
    held = [*value] if isinstance(value, list | tuple | set | deque) else []
    if not callable(value):
        named = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        held += [*named, *named.values()]
    version = value._version if isinstance(value, Tensor) and not value.is_inference() else None
    return version, [_state(x, depth - 1) for x in held] if depth and held else id(value)


class Modes(AbstractContextManager[None]):
    """A context that sets back, after a failure, the modes of this thread that contexts around tasks change.

    An interrupt (Ctrl-C) can come right before a context is left, and then it never is.
    """

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._passing = CheckpointPhase()
        self._private = PrivateGenerator.present()
        self._stacks, self._dtype = mode_stacks(), torch.get_default_dtype()

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            return
        torch.set_grad_enabled(self._grad)
        self._passing.__enter__()
        PrivateGenerator.back_to(self._private)
        if mode_stacks() != self._stacks:
            set_mode_stacks(self._stacks)
        torch.set_default_dtype(self._dtype)


WITHOUT_FAST_ATTENTION = Everywhere(
    torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False
)
"""Let attention in evaluation mode compute as it does with gradients. Without these PyTorch takes another way, which
gives something else where inputs are masked."""
