"""Recorded calls of a module, and a function that cuts the calls into layers (`cut`).

In the recorded arguments of a call, placeholders stand for tensors and devices.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor

from torchgpipe.trace.parts import Slots, within
from torchgpipe.trace.refuse import Where


@dataclass(frozen=True)
class Value:
    """A placeholder in recorded arguments for an input, or for a tensor that a call returned.

    The inputs and these tensors are numbered. The inputs come first.
    """

    number: int


@dataclass(frozen=True)
class Held:
    """A placeholder in recorded arguments for a parameter, a buffer, or a constant tensor.

    The name is the tensor's name in the module. Constant tensors get a new name.
    """

    name: str


@dataclass(frozen=True)
class Device:
    """A placeholder in recorded arguments for the device that the module is on."""


class Call(NamedTuple):
    """One recorded call of a function or of a submodule.

    Attributes:
        target: The function, or the submodule's name.
        args: The positional arguments. Placeholders (`Value`, `Held`, `Device`) replace tensors and
            the module's device.
        kwargs: The keyword arguments, with the same placeholders.
        outputs: The numbers of the tensors that the call returns, in order.
        grad: Whether gradients are enabled during the call.
        spent: In a layer, the numbers of the tensors that are not used after this call. They are
            freed.
        caller: The name of the module whose forward makes the call.
        since: If the call changes a tensor in place, the index of the call that made the tensor, or
            -1 if the tensor is an input. Otherwise the index of this call. The calls from `since`
            to this call have to be in one layer.
        where: The file and line of the call.
    """

    target: Callable[..., Any] | str
    args: Any
    kwargs: Any
    outputs: tuple[int, ...]
    grad: bool
    spent: tuple[int, ...] = ()
    caller: str = ""
    since: int = -1
    where: Where = ("", 0)


class BatchSize(NamedTuple):
    """Where a layer reads the batch size: a dimension of a tensor.

    The batch size is the length of this dimension, divided by `each`.

    Attributes:
        value: The number of the tensor, which is an input or a skip of the layer.
        dimension: The index of the dimension.
        each: How much longer the dimension is for each additional sample.
    """

    value: int
    dimension: int
    each: int


@dataclass
class RecordedCalls:
    """The calls that a module made for inputs of one batch size, and what it returned.

    Attributes:
        size: The batch size.
        calls: The calls, in order.
        shapes: The shapes of the inputs and of all tensors that calls returned, by number. The
            inputs come first.
        result: What the module returned, with slots (placeholders) in place of tensors; and a list
            of these slots.
        outputs: For each slot, the number of its tensor.
        extra: Tensors that the module holds and that are neither parameters nor buffers, by name.
        state: For messages: the training mode and the autocast of this recording. The text is empty
            if they are the same as in the first recordings.
    """

    size: int
    calls: list[Call]
    shapes: list[tuple[int, ...]]
    result: tuple[Any, Slots]
    outputs: tuple[int, ...]
    extra: dict[str, Tensor]
    state: str = ""


@dataclass
class LayerPlan:
    """The plan of a layer: its calls, and the numbers of the tensors that enter and leave it.

    Attributes:
        name: The layer's name.
        calls: The calls that the layer makes.
        inputs: The numbers of the tensors from the previous layer.
        outputs: The numbers of the tensors for the next layer.
        pops: The names of the skips that enter the layer, and the numbers of their tensors.
        stashes: The names of the skips that leave the layer, and the numbers of their tensors.
        batch: Where the layer reads the batch size; `None` if no call needs the batch size.
    """

    name: str
    calls: list[Call]
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    pops: list[tuple[str, int]] = field(default_factory=list)
    stashes: list[tuple[str, int]] = field(default_factory=list)
    batch: BatchSize | None = None


Stops = dict[int, list[int]]
"""For each tensor (by number), the indices of the layers that make, use or pass it, in order."""


def cut(
    calls: Sequence[Call], names: Sequence[str], inputs: int, outputs: Sequence[int]
) -> list[LayerPlan]:
    """Cut calls into layers, and find how tensors go from layer to layer.

    A layer begins with a call that has a name in `names`. A call without a name is in the same
    layer as the call before it. If a call makes a tensor and later calls change this tensor in
    place, all calls from the first to the last of these calls are in one layer.

    A tensor goes from the layer that makes it to the next layer that uses it, and so on. For
    example, layer 2 makes a tensor, and layers 3 and 6 use it. Then the tensor is an output of
    layer 2, and a skip from layer 3 to layer 6.

    Args:
        calls: The calls.
        names: For each call, the name of the layer that may begin with it, or "".
        inputs: How many inputs the module has. Their numbers are 0 to `inputs` - 1.
        outputs: The numbers of the tensors that the module returns.
    """
    layers = _divided(calls, names)
    stops = _stops(layers, inputs, outputs)
    layers[0].inputs = list(range(inputs))
    layers[-1].outputs = list(dict.fromkeys(outputs))
    for number, places in stops.items():
        for source, target in pairwise(places):
            if target == source + 1:
                layers[source].outputs.append(number)
                layers[target].inputs.append(number)
            else:
                skip = (f"{number}:{source}", number)
                layers[source].stashes.append(skip)
                layers[target].pops.append(skip)
    return layers


def _divided(calls: Sequence[Call], names: Sequence[str]) -> list[LayerPlan]:
    """Cut the calls into layers. Of each layer, only the name and the calls are set."""
    # No layer begins between a call that makes a tensor and a call that changes the tensor.
    inside: set[int] = set()
    for k, call in enumerate(calls):
        inside.update(range(call.since + 1, k + 1))
    named = [k for k, name in enumerate(names) if name]
    starts = [0, *named[1:]]  # The first layer has all calls before the first call with a name.
    bounds = [k for k in starts if k == 0 or k not in inside]
    bounds.append(len(calls))
    layers = []
    for start, end in pairwise(bounds):
        name = next(filter(None, names[start:end]), "")
        layers.append(LayerPlan(name, list(calls[start:end])))
    return layers


def _stops(layers: Sequence[LayerPlan], inputs: int, outputs: Sequence[int]) -> Stops:
    """Return for each tensor the layers that make, use or pass it."""
    stops: Stops = {number: [0] for number in range(inputs)}
    for k, layer in enumerate(layers):
        for call in layer.calls:
            used = [value.number for value in within((call.args, call.kwargs), Value)]
            for number in (*used, *call.outputs):
                places = stops.setdefault(number, [])
                if k not in places:
                    places.append(k)
    last = len(layers) - 1
    for number in outputs:
        if last not in stops[number]:
            stops[number].append(last)
    for k in range(last):
        _hand_on(stops, k, len(layers))
    return stops


def _hand_on(stops: Stops, k: int, layers: int) -> None:
    """Make sure that layer `k` has an output for layer `k` + 1, because `GPipe` needs an output.

    If only skips pass the border between these two layers, the skip over the fewest layers also
    becomes an output of layer `k`. For this, `k` and `k` + 1 are added to its stops, which are the
    layers that make, use or pass it.
    """
    shortest = (layers, 0)
    for number, places in stops.items():
        for source, target in pairwise(places):
            if source <= k < target:
                shortest = min(shortest, (target - source, number))
    distance, number = shortest
    if distance > 1:
        stops[number] = sorted({*stops[number], k, k + 1})
