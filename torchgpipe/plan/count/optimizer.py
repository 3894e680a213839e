"""Compute the bytes that an optimizer takes on a device, beyond parameters and gradients.

An optimizer keeps its state between steps, and each step allocates temporary tensors. How many
bytes a step allocates depends on PyTorch's default for the device:

- On a CPU, a step updates one parameter after another. For each parameter, it allocates tensors as
  large as the parameter, while tensors for the previous parameter may still exist.
- On CUDA, a step updates all parameters at once (`foreach`). It allocates tensors as large as all
  parameters together.

If parameters have 16 bits, an optimizer can keep master weights: a float32 copy of the parameters,
which the optimizer updates. Then the optimizer's state is as large as for float32 parameters, and
the step also allocates float32 gradients. Training with autocast needs no master weights, because
its parameters are float32.
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
"""The memory of each optimizer, with PyTorch's defaults. Tests compare it with real steps.

The four numbers are in bytes for each byte of parameters: the state, the tensors that a step
allocates for one parameter, the tensors that then still exist for the previous parameter, and the
tensors that a step allocates if it updates all parameters at once.
"""

MASTER = 2
"""Bytes of a float32 copy for each byte of a parameter in 16 bits."""


@dataclass(frozen=True)
class Optimizer:
    """The memory that an optimizer takes: its bytes for each byte of the updated parameters."""

    state: float = 0.0
    """The bytes of the state, which the optimizer keeps between steps."""
    made: float = 0.0
    """The bytes that a step allocates for the parameter, or all parameters, that it updates."""
    left: float = 0.0
    """The bytes that then still exist for the previous parameter."""
    together: bool = False
    """Whether a step updates all parameters of a device at once."""
    updates: bool = True
    """Whether there is an optimizer at all. If not, no step is predicted for it."""

    def temporaries(self, sizes: Sequence[float]) -> float:
        """Return the largest number of bytes that a step's temporary tensors take at once.

        Args:
            sizes: The bytes of each parameter, in the order in which a step updates them.
        """
        if self.together:
            return self.made * sum(sizes)
        most = 0.0
        for before, now in pairwise([0.0, *sizes]):
            most = max(most, self.left * before + self.made * now)
        return most


STATELESS = Optimizer()
"""Plain stochastic gradient descent, which holds no state and allocates nothing."""


def optimizer_named(name: str, *, foreach: bool, master_weights: bool = False) -> Optimizer:
    """Return how much memory the optimizer `name` takes for each byte of parameters.

    Args:
        name: One of `OPTIMIZERS`.
        foreach: Whether a step updates all parameters at once.
        master_weights: Whether the optimizer keeps a float32 copy of parameters in 16 bits.
    """
    state, made, left, at_once = OPTIMIZERS[name]
    if name == "none":
        return Optimizer(updates=False)
    if foreach:
        made, left = at_once, 0.0
    if master_weights:
        state = MASTER * (state + 1)
        made = MASTER * (made + 1)
        left = MASTER * (left if foreach else left + 1)
    together = foreach and made > 0
    return Optimizer(state, made, left, together)
