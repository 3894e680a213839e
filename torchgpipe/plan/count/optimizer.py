"""Tell what an optimizer holds on a device, beside parameters and gradients.

It holds its state, and its step allocates temporary tensors. There are two kinds of steps. By
default on a CPU, a step updates one parameter after another. It allocates tensors as large as the
present parameter, while tensors of the previous parameter may still be there. By default on CUDA, a
step updates all parameters of a device at once (`foreach`), and allocates tensors as large as all
of them.

If parameters are in 16 bits, an optimizer may keep a copy of them in float32, the master weights,
and work on the copy. The state is then as large as for the copy, and the step also allocates
gradients for the copy. Under autocast no copy is needed, since the parameters themselves are in
float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

OPTIMIZERS = {
    "none": (0.0, 0.0, 0.0, 0.0),
    "sgd": (0.0, 0.0, 0.0, 0.0),
    "momentum": (1.0, 0.0, 0.0, 0.0),
    "rmsprop": (1.0, 1.0, 1.0, 1.0),
    "adagrad": (1.0, 1.0, 1.0, 2.0),
    "adam": (2.0, 2.0, 1.0, 1.0),
    "adamw": (2.0, 2.0, 1.0, 1.0),
}
"""The optimizers with a name, with PyTorch's defaults. Tests compare the numbers with real steps.

The four numbers are in bytes for each byte of parameters: the state, what a step allocates for one
parameter, what is left of the previous parameter, and what a step allocates for all at once.
"""

MASTER = 2
"""Bytes of a float32 copy for each byte of a parameter in 16 bits."""


@dataclass(frozen=True)
class Optimizer:
    """What an optimizer holds, in bytes for each byte of parameters."""

    state: float = 0.0
    """What the optimizer keeps between steps."""
    made: float = 0.0
    """The most that a step allocates at a time, for the parameters that it updates at a time."""
    left: float = 0.0
    """What is still there of the previous parameter at that moment."""
    together: bool = False
    """Whether a step updates all parameters of a device at once."""
    updates: bool = True
    """Whether there is an optimizer at all."""

    def temporaries(self, sizes: Sequence[float]) -> float:
        """Return the most bytes that a step allocates for parameters of these sizes, in order."""
        if self.together:
            return self.made * sum(sizes)
        most = 0.0
        for before, now in pairwise([0.0, *sizes]):
            most = max(most, self.left * before + self.made * now)
        return most


STATELESS = Optimizer()
"""Plain stochastic gradient descent, which holds no state and allocates nothing."""


def optimizer_named(name: str, *, foreach: bool, master_weights: bool = False) -> Optimizer:
    """Return what the optimizer of that name holds.

    Args:
        name: One of `OPTIMIZERS`.
        foreach: Whether its step updates all parameters at once.
        master_weights: Whether it keeps a float32 copy of parameters in 16 bits.
    """
    state, made, left, at_once = OPTIMIZERS[name]
    if name == "none":
        return Optimizer(updates=False)
    if foreach:
        made, left = at_once, 0.0
    together = foreach and made > 0
    if master_weights:
        state = MASTER * (state + 1)
        made = MASTER * (made + 1)
        left = MASTER * (left if foreach else left + 1)
    return Optimizer(state, made, left, together)
