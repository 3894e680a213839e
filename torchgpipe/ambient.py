"""The modes around the caller's code, which threads do not share: grad mode, inference mode, autocast."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

__all__ = ["Ambient"]

# Devices that have an autocast of their own; others, such as meta, follow no autocast state.
_AUTOCAST = ("cpu", "cuda", "xpu")


class Ambient:
    """Remember the modes of the thread that makes it, to enter them in another thread or at a later time."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        types = {"cpu", *(d.type for d in devices)}.intersection(_AUTOCAST)
        self._autocast = [(t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in types]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Enter all of the modes."""
        with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad), self.autocast():
            yield

    def autocast(self) -> AbstractContextManager[object]:
        """Return what enters, in this thread, the autocast state alone, on or off, without its cache of weights.

        A weight that a task without a graph casts must not serve one with a graph: its gradient would be lost.
        """
        for state in self._autocast:
            if state[1] or torch.is_autocast_enabled(state[0]):
                return _cast([s for s in self._autocast if s[1] or torch.is_autocast_enabled(s[0])])
        return _NOTHING


_NOTHING = nullcontext()


@contextmanager
def _cast(states: list[tuple[str, bool, torch.dtype]]) -> Iterator[None]:
    with ExitStack() as stack:
        for device_type, enabled, dtype in states:
            stack.enter_context(torch.autocast(device_type, dtype, enabled, cache_enabled=False))
        yield
