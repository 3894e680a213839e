"""What an optimizer holds on a device beside parameters and gradients: its state, and what its step makes for itself.

Both are counted on real steps of `torch.optim` on `meta`. There are two kinds of steps: one parameter after another,
as by default on a CPU, and all of a device at once (`foreach`), as by default on CUDA. The first makes tensors as
large as the parameter at hand, while those of the one before may still be there; the second as large as all.

Where parameters are in 16 bits, an optimizer may keep a copy of them in float32, the master weights, and work on that:
its state is as large as the copy, and so are the gradients that its step makes for it. Under autocast none is needed,
for there the parameters themselves are in float32.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from torchgpipe.plan.count.live import Live

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer] | None] = {
    "none": None,
    "sgd": torch.optim.SGD,
    "momentum": functools.partial(torch.optim.SGD, momentum=0.9),
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
"""Those that are known by name, with PyTorch's defaults."""

ELEMENTS = 1024
"""Of a parameter that is counted with."""
MASTER = 2
"""Bytes of float32 for each byte of a parameter in 16 bits."""


@dataclass(frozen=True)
class Optimizer:
    """What an optimizer holds, in bytes for each byte of parameters."""

    state: float = 0.0
    """What it keeps between steps."""
    made: float = 0.0
    """What its step makes for the parameters at hand, at most at once."""
    left: float = 0.0
    """What is still there of the parameter before, at that moment."""
    together: bool = False
    """Whether a step has all of a device's parameters at hand, rather than one at a time."""
    updates: bool = True
    """Whether there is an optimizer at all."""

    def temporaries(self, sizes: Sequence[float]) -> float:
        """Return the most bytes that a step makes for parameters of these sizes, in their order."""
        if self.together:
            return self.made * sum(sizes)
        return max((self.left * a + self.made * b for a, b in pairwise([0.0, *sizes])), default=0.0)


STATELESS = Optimizer()
"""Plain stochastic gradient descent: no state, and nothing made."""


@functools.cache
def optimizer_named(name: str, *, foreach: bool, master_weights: bool = False) -> Optimizer:
    """Return what the optimizer of that name holds, if its step handles all parameters at once (`foreach`) or not.

    With `master_weights`, of parameters in 16 bits.
    """
    make = OPTIMIZERS[name]
    if make is None:
        return Optimizer(updates=False)
    if master_weights:
        plain = optimizer_named(name, foreach=foreach)
        made, left = MASTER * (plain.made + 1), MASTER * (plain.left + (0 if foreach else 1))
        return Optimizer(MASTER * (plain.state + 1), made, left, plain.together)
    (state, one), (_, two), (_, three) = (_counted(make, foreach, count) for count in (1, 2, 3))
    together = three > two  # what grows with the number of parameters
    return Optimizer(state, one, 0.0 if together else two - one, together)


def _counted(make: Callable[..., torch.optim.Optimizer], foreach: bool, count: int) -> tuple[float, float]:
    """Return the bytes of state, and the most that a step makes, for each byte of one of `count` equal parameters."""
    parameters = [nn.Parameter(torch.empty(ELEMENTS, device="meta")) for _ in range(count)]
    optimizer = make(parameters, lr=0.1, foreach=foreach)
    for _ in range(2):  # the first makes the state
        for p in parameters:
            p.grad = torch.empty_like(p)
        live = Live()
        held: list[Any] = [x for state in optimizer.state.values() for x in state.values()]
        live.ignore([*parameters, *(p.grad for p in parameters if p.grad is not None), *filter(torch.is_tensor, held)])
        with live:
            optimizer.step()
    nbytes = parameters[0].nbytes
    # Counters of steps are on the host, whatever the parameters' device.
    state = sum(x.nbytes for x in optimizer.state[parameters[0]].values() if torch.is_tensor(x) and x.is_meta)
    return state / nbytes, live.peak() / nbytes
