"""Describe what one layer does and what it holds in memory, as numbers.

A tensor that goes from layer to layer has one storage, and its storage has one number in the
footprints of all layers, whichever of them save it.
"""

from typing import NamedTuple

from torchgpipe.plan.hardware.operators import Operator


class Change(NamedTuple):
    """Bytes that are allocated, or freed if they are negative."""

    bytes: float
    storage: int | None
    """The number of a storage that entered the layer, or `SUMMED`; `None` for other storages."""


SUMMED = -1
"""The storage number of a parameter's gradient that was added to an earlier gradient."""


class Stashed(NamedTuple):
    """A skip that a layer stashes."""

    skip: int
    """The number of its storage."""
    bytes: float
    """The bytes of its storage."""
    copied: float = 0.0
    """The bytes of its tensor, which are copied to another device."""
    grad: float = 0.0
    """The bytes of its gradient."""


class Footprint(NamedTuple):
    """What one layer holds for one micro-batch. Storages are given by their numbers."""

    inputs: tuple[int, ...] = ()
    pops: tuple[int, ...] = ()
    """The skips that the layer pops."""
    outputs: tuple[int, ...] = ()
    stashes: tuple[Stashed, ...] = ()
    saves: tuple[int, ...] = ()
    """What the autograd graph saves for the backward, apart from parameters and buffers."""
    sizes: tuple[tuple[int, float], ...] = ()
    """The bytes of each storage."""
    forward: float = 0.0
    """The peak of a forward without a graph, beside its inputs."""
    graph: float = 0.0
    """The peak of a forward that builds the graph, beside its inputs; it includes what is saved."""
    traces: tuple[tuple[Change, ...], ...] = ()
    """Four backwards, from the moment at which the outputs' gradients are there.

    The first and third find no gradients of parameters, the second and fourth do. In the third and
    fourth, somebody else holds the outputs' gradients until the backward ends.
    """
    input_grad: float = 0.0
    """The bytes of the gradients that the layer hands to the layer before."""
    output_grad: float = 0.0
    """The bytes of its outputs' gradients, apart from those of stashed skips."""
    in_place: bool = False
    """Whether the layer changes its input in place."""


class LayerCount(NamedTuple):
    """What one layer does for one micro-batch, in operators, and the bytes of its tensors."""

    name: str
    forward: tuple[Operator, ...]
    backward: tuple[Operator, ...]
    accumulate: tuple[Operator, ...]
    """What a backward does besides, if the parameters have gradients from earlier backwards."""
    output: float
    """The bytes of the output, which the layer hands to the next layer."""
    parameters: int
    """The bytes of the parameters that get gradients."""
    parameter_sizes: tuple[int, ...]
    """The bytes of each of these parameters."""
    frozen: int
    """The bytes of the other parameters, and of the buffers."""
    gives: tuple[bool, ...]
    """For each input, whether the layer gives it a gradient."""

    @property
    def products(self) -> tuple[Operator, ...]:
        """The matrix products with parameters.

        The backward does each of them once more for the gradients of these parameters alone.
        """
        if not self.parameters:
            return ()
        return tuple([x for x in self.forward if x.flops and "attention" not in x.kind])
