"""The modes around the caller's code, which PyTorch keeps for each thread apart.

Worker threads enter all of them; a recomputation enters those that may have changed since the first pass.
"""

import contextvars
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch

from torchgpipe.task.seeded import PrivateGenerator
from torchgpipe.tensors._autograd import default_device, torch_function_enabled, with_torch_function
from torchgpipe.tensors.checkpoint import Passing, is_checkpointing, is_recomputing
from torchgpipe.tensors.observe import NOTHING

# Devices that have an autocast of their own; others, such as meta, follow no autocast state.
_AUTOCAST = ("cpu", "cuda", "xpu")


class Ambient:
    """Remember the modes of the thread that makes it, to enter them in another thread or at a later time.

    They are grad mode, inference mode, autocast, the default device, whether `__torch_function__` is on, and which pass
    an outer pipeline is in.

    Attributes:
        context: the thread's context variables, which a recomputation runs in, too.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        types = {"cpu", *(d.type for d in devices)}.intersection(_AUTOCAST)
        self._autocast = [(t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in types]
        self._types = [*types]
        self.casts = any(enabled for _, enabled, _ in self._autocast)
        self._device = default_device()
        self._checkpointing, self._recomputing = is_checkpointing(), is_recomputing()
        self._torch_function = torch_function_enabled()
        self.context = contextvars.copy_context()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Enter all of the modes, in a worker thread."""
        passing = Passing(checkpointing=self._checkpointing, recomputing=self._recomputing)
        with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad), passing, self.again():
            yield

    def for_first_pass(self) -> AbstractContextManager[object]:
        """Return what to enter around a first pass, which runs without a graph, in a thread that has the modes.

        Autocast must not cache weights there: a cast made without grad would cut later tasks off from the weight.
        """
        return self._as_before(False, False) if self.casts else NOTHING

    def again(self) -> AbstractContextManager[object]:
        """Return a context that sets autocast, the default device and `__torch_function__` (no other) as they were."""
        cast = self.casts or True in map(torch.is_autocast_enabled, self._types)
        other_device = default_device() != self._device
        turned_off = self._torch_function and not torch_function_enabled()
        return self._as_before(other_device, turned_off) if cast or other_device or turned_off else NOTHING

    @contextmanager
    def _as_before(self, other_device: bool, turned_off: bool) -> Iterator[None]:
        with ExitStack() as stack:
            if turned_off:
                stack.enter_context(with_torch_function())
            if other_device:
                stack.enter_context(self._device or torch.device("cpu"))
            for device_type, enabled, dtype in self._autocast:
                if enabled or torch.is_autocast_enabled(device_type):
                    stack.enter_context(torch.autocast(device_type, dtype, enabled, cache_enabled=False))
            yield


class Modes:
    """The modes of this thread that contexts around tasks change, to set them back after a failure.

    An interrupt (Ctrl-C) can come right before a context is left, and then it never is.
    """

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._passing = Passing(checkpointing=is_checkpointing(), recomputing=is_recomputing())
        self._private = PrivateGenerator.present()

    def set_back(self) -> None:
        """Set the modes as they were."""
        torch.set_grad_enabled(self._grad)
        self._passing.__enter__()
        PrivateGenerator.back_to(self._private)


_lock = threading.Lock()
_within = 0  # first passes that are within `without_fast_attention`, in all threads
_fast = True  # what the setting was before


@contextmanager
def without_fast_attention() -> Iterator[None]:
    """Let attention in evaluation mode compute as it does with gradients, in all threads.

    Without gradients PyTorch takes another way, which gives something else where inputs are masked.
    """
    global _within, _fast
    with _lock:
        if _within == 0:
            _fast = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
        _within += 1
    try:
        yield
    finally:
        with _lock:
            _within -= 1
            if _within == 0:
                torch.backends.mha.set_fastpath_enabled(_fast)
