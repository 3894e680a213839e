"""What an optimizer holds on a device beside parameters and gradients: its state, and what its step makes for itself.

There are two kinds of steps: one parameter after another, as by default on a CPU, and all of a device at once
(`foreach`), as by default on CUDA. The first makes tensors as large as the parameter at hand, while those of the one
before may still be there; the second as large as all.

Where parameters are in 16 bits, an optimizer may keep a copy of them in float32, the master weights, and work on that:
its state is as large as the copy, and so are the gradients that its step makes for it. Under autocast none is needed,
for there the parameters themselves are in float32.
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
"""Those that are known by name, with PyTorch's defaults: in bytes for each byte of parameters the state, what a step
makes and what is left of the parameter before, and what a step for all at once makes. Tests compare it with real steps.
"""

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


def optimizer_named(name: str, *, foreach: bool, master_weights: bool = False) -> Optimizer:
    """Return what the optimizer of that name holds, if its step handles all parameters at once (`foreach`) or not.

    With `master_weights`, of parameters in 16 bits.
    """
    state, made, left, at_once = OPTIMIZERS[name]
    if name == "none":
        return Optimizer(updates=False)
    if foreach:
        made, left = at_once, 0.0
    together = foreach and made > 0
    if master_weights:
        state, made, left = (
            MASTER * (state + 1),
            MASTER * (made + 1),
            MASTER * (left + (not foreach)),
        )
    return Optimizer(state, made, left, together)
