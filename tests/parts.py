"""`Fails`, a layer that raises an error when a test asks for it; a dictionary of optimizers."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn, optim

from torchgpipe import is_recomputing

KINDS = (optim.SGD, optim.RMSprop, optim.Adagrad, optim.Adam, optim.AdamW)
OPTIMIZERS: dict[str, Any] = {x.__name__.lower(): x for x in KINDS} | {
    "momentum": partial(optim.SGD, momentum=0.9)
}


class Fails(nn.Module):
    """An identity layer that a test can make fail, once, in a forward, recomputation or backward.

    `fail(when, error)` makes the layer raise `error` the next time it runs in `when`, which is
    "forward", "recompute" or "backward". `at(when, act)` makes the layer call the function `act`
    instead.
    """

    def __init__(self) -> None:
        super().__init__()
        self.when, self.calls_before = "", 0
        self.act: Callable[[], object] = int

    def fail(self, when: str, error: BaseException, *, calls_before: int = 0) -> None:
        self.at(when, partial(explode, error), calls_before=calls_before)

    def at(self, when: str, act: Callable[[], object], *, calls_before: int = 0) -> None:
        self.when, self.act, self.calls_before = when, act, calls_before

    def forward(self, x: Tensor) -> Tensor:
        self.reach("recompute" if is_recomputing() else "forward")
        y = x.clone()
        if y.requires_grad:
            y.register_hook(lambda grad: self.reach("backward"))
        return y

    def reach(self, now: str) -> None:
        if now != self.when:
            return
        if self.calls_before:
            self.calls_before -= 1
            return
        act, self.when, self.act = self.act, "", int
        act()


def explode(error: BaseException) -> None:
    raise error
