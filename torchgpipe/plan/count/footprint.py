"""Data classes for the counts of one layer: its operators, and the memory that it takes.

The memory that a layer takes is called its footprint. In a footprint, a number stands for each
storage. If several layers use a storage, it has the same number in all their footprints.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torchgpipe.plan.hardware.operators import Operator


class Change(NamedTuple):
    """A change of memory: its bytes are positive for an allocation, and negative for a release."""

    bytes: float
    storage: int | None
    """The number of a storage that is an input of the layer, or `SUMMED`; `None` for any other."""


SUMMED = -1
"""The storage number of a parameter's gradient that was added to an earlier gradient."""


class Stashed(NamedTuple):
    """A skip that a layer stashes."""

    skip: int
    """The number of the skip's storage."""
    bytes: float
    """The bytes of the skip's storage."""
    copied: float = 0.0
    """The bytes of the skip's tensor, which are copied to another device."""
    grad: float = 0.0
    """The bytes of the skip's gradient."""


class Footprint(NamedTuple):
    """The memory that one layer takes for one micro-batch.

    Each storage has a number. Fields such as `inputs` and `saves` list storages by their numbers,
    and `sizes` has the bytes of each storage.
    """

    inputs: tuple[int, ...] = ()
    pops: tuple[int, ...] = ()
    """The skips that the layer pops."""
    outputs: tuple[int, ...] = ()
    stashes: tuple[Stashed, ...] = ()
    saves: tuple[int, ...] = ()
    """The storages that autograd saves for the backward, without parameters and buffers."""
    sizes: tuple[tuple[int, float], ...] = ()
    """The bytes of each storage."""
    forward: float = 0.0
    """The peak memory of a forward without an autograd graph, without the layer's inputs."""
    graph: float = 0.0
    """The peak memory of a forward with a graph and its saved tensors, without the inputs."""
    traces: tuple[tuple[Change, ...], ...] = ()
    """The changes of memory in four backwards, after the outputs' gradients have arrived.

    In the first and third backward, parameters have no gradients yet. In the second and fourth,
    they have gradients. In the third and fourth, the caller holds the outputs' gradients until the
    backward ends.
    """
    input_grad: float = 0.0
    """The bytes of the gradients that the layer gives to the previous layer."""
    output_grad: float = 0.0
    """The bytes of the gradients of the layer's outputs, without gradients of stashed skips."""
    in_place: bool = False
    """Whether the layer changes its input in place."""


def list_skips(layers: Sequence[Footprint]) -> list[tuple[int, int, Stashed]]:
    """Return the skips of a model, from the footprints of its layers.

    Each skip is a tuple: the number of the layer that stashes it, the number of the layer that pops
    it, and its bytes.
    """
    popped: dict[int, int] = {}
    for index, layer in enumerate(layers):
        popped |= dict.fromkeys(layer.pops, index)
    found = []
    for index, layer in enumerate(layers):
        found += [(index, popped[stashed.skip], stashed) for stashed in layer.stashes]
    return found


class Tied(NamedTuple):
    """A parameter that a layer shares with other layers, such as an embedding's weight."""

    number: int
    """A number of the parameter, which is the same in all layers that share it."""
    bytes: int
    trained: bool
    """Whether the parameter gets gradients."""


class LayerCount(NamedTuple):
    """The operators that one layer runs for one micro-batch, and the bytes of its tensors."""

    name: str
    forward: tuple[Operator, ...]
    products: tuple[Operator, ...]
    """The products in the forward in which a parameter that gets a gradient is a factor.

    For each of these products, the backward has an equally large one, which computes the gradient
    of the parameter.
    """
    backward: tuple[Operator, ...]
    accumulate: tuple[Operator, ...]
    """The operators that add a backward's gradients to the parameters' existing gradients."""
    output: float
    """The bytes of the layer's output."""
    parameters: int
    """The bytes of the parameters that get gradients."""
    parameter_sizes: tuple[int, ...]
    """The bytes of each of these parameters."""
    frozen: int
    """The bytes of buffers and of parameters that get no gradients."""
    gives: tuple[bool, ...]
    """For each input, whether the layer gives it a gradient."""
    tied: tuple[Tied, ...] = ()
    """The parameters of the layer that other layers have, too."""
