"""What one layer does, and what it holds in memory, as numbers: peaks, what it saves, and the trace of its backward.

A tensor that goes from layer to layer is one storage with one number, whoever saves it.
"""

from typing import NamedTuple

from torchgpipe.plan.hardware.operators import Operator


class Change(NamedTuple):
    """Bytes that come to life or die; of which storage, where it is one that entered the layer."""

    bytes: float
    storage: int | None


SUMMED = -1
"""In place of a storage: what dies is a parameter's gradient of this micro-batch, added to that of earlier ones."""


class Stashed(NamedTuple):
    """A skip by its storage's number, and the bytes of that, of the tensor, and of its gradient."""

    skip: int
    bytes: float
    copied: float = 0.0
    grad: float = 0.0


class Footprint(NamedTuple):
    """What one layer holds for one micro-batch. Storages are numbers; `sizes` has their bytes."""

    inputs: tuple[int, ...] = ()
    pops: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    stashes: tuple[Stashed, ...] = ()
    saves: tuple[int, ...] = ()
    """What its graph keeps for backward, parameters and buffers apart."""
    sizes: tuple[tuple[int, float], ...] = ()
    forward: float = 0.0
    """The most bytes beside its inputs, without a graph."""
    graph: float = 0.0
    """The most bytes beside its inputs, with a graph; what it saves is among them."""
    traces: tuple[tuple[Change, ...], ...] = ()
    """Backward, from where the outputs' gradients are there: if parameters have no gradients yet, and if they have; and
    both if somebody holds the outputs' gradients until its end."""
    input_grad: float = 0.0
    """Bytes of the gradients that it hands to the layer before."""
    output_grad: float = 0.0
    """Bytes of the gradients of its output, those of stashed skips apart."""
    in_place: bool = False
    """Whether it changes its input."""


class LayerCount(NamedTuple):
    """What one layer does and holds for one micro-batch: operators, and bytes."""

    name: str
    forward: tuple[Operator, ...]
    backward: tuple[Operator, ...]
    accumulate: tuple[Operator, ...]
    """What backward does besides, where the parameters have gradients already: all but the first time in a step."""
    output: float
    """Bytes that it hands to the next layer."""
    parameters: int
    """Bytes of parameters that take gradients."""
    parameter_sizes: tuple[int, ...]
    """The bytes of each of these."""
    frozen: int
    """Bytes of other parameters, and of buffers."""
    gives: tuple[bool, ...]
    """Which of its inputs get a gradient from it."""

    @property
    def products(self) -> tuple[Operator, ...]:
        """Its products with parameters: backward does each once more for these alone."""
        return tuple(
            [x for x in self.forward if x.flops and "attention" not in x.kind and self.parameters]
        )
