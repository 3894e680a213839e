"""Recordings of calls, with stand-ins for the tensors in their arguments; calls cut into layers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor

from torchgpipe.trace.parts import Slots, within
from torchgpipe.trace.refuse import Where


@dataclass(frozen=True)
class Value:
    """Stands for a tensor that is an input or was returned by a call, by its number."""

    number: int


@dataclass(frozen=True)
class Held:
    """Stands for a parameter, a buffer, or another tensor that the module holds, by its name."""

    name: str


@dataclass(frozen=True)
class Device:
    """Stands for the device that the module is on."""


class Call(NamedTuple):
    """One call of a function or of a submodule.

    Attributes:
        target: The function, or the submodule's name.
        args: The arguments by place, with `Value`, `Held` and `Device` in them.
        kwargs: The arguments by name, likewise.
        outputs: The numbers of the tensors that the call returns, in their order.
        grad: Whether gradients are recorded.
        spent: In a layer: the numbers of the values that no later call of the layer uses.
        caller: The name of the module whose forward makes the call.
        since: The index of the call that made what this call changes in place; -1 for an input.
            Both calls have to run on one device.
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
    """Where a layer reads the batch size.

    Attributes:
        value: The number of a value that enters the layer.
        dimension: A dimension of it.
        each: How long the dimension is for each sample.
    """

    value: int
    dimension: int
    each: int


@dataclass
class Recording:
    """What a module did with inputs of one batch size.

    Attributes:
        size: The batch size.
        calls: The calls, in order.
        shapes: The shapes of all values, by number. The inputs come first.
        result: What the module returned, with slots in place of tensors, and these slots.
        outputs: The numbers of the values that belong into the slots.
        extra: Tensors that the module holds and that are neither parameters nor buffers, by name.
        state: How the recording was unlike the first recordings, such as in another mode; for a
            message.
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
    """A layer to be made: its calls, and the numbers of the values that enter and leave it.

    Attributes:
        name: The layer's name.
        calls: The calls that it makes.
        inputs: The values that it takes from the layer before.
        outputs: The values that it gives to the following layer.
        pops: The skips that it pops, by name, and their values.
        stashes: The skips that it stashes, by name, and their values.
        batch: Where it reads the batch size; `None` if no call needs that.
    """

    name: str
    calls: list[Call]
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    pops: list[tuple[str, int]] = field(default_factory=list)
    stashes: list[tuple[str, int]] = field(default_factory=list)
    batch: BatchSize | None = None


Stops = dict[int, list[int]]
"""By value: the layers where it stops, in order."""


def cut(
    calls: Sequence[Call], names: Sequence[str], inputs: int, outputs: Sequence[int]
) -> list[LayerPlan]:
    """Cut calls into layers, and find how values go from layer to layer.

    A layer begins with a call that has a name. Calls without a name join the layer before. All
    calls from one that makes a tensor to the last one that changes it in place are in one layer.

    A tensor goes to the next layer that uses it: as an output if that is the following layer, and
    as a skip if it is a later layer.

    Args:
        calls: The calls.
        names: The name of the layer that may begin with each call, or "".
        inputs: The number of the module's inputs. The values below it are these inputs.
        outputs: The values that the module returns.
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
    """Return layers with their names and calls."""
    # No layer begins between the call that makes a tensor and a call that changes it.
    inside: set[int] = set()
    for k, call in enumerate(calls):
        inside.update(range(call.since + 1, k + 1))
    named = [k for k, name in enumerate(names) if name]
    starts = [0, *named[1:]]  # the calls before the first one with a name are in its layer
    bounds = [k for k in starts if k == 0 or k not in inside]
    bounds.append(len(calls))
    layers = []
    for start, end in pairwise(bounds):
        name = next(filter(None, names[start:end]), "")
        layers.append(LayerPlan(name, list(calls[start:end])))
    return layers


def _stops(layers: Sequence[LayerPlan], inputs: int, outputs: Sequence[int]) -> Stops:
    """Return the layers that make, use or pass each value."""
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
    """Let layer k have an output, which `GPipe` needs.

    If all values that the layer hands on would be skips, the one with the shortest way stops at
    layer k and at the following layer, too.
    """
    shortest = (layers, 0)
    for number, places in stops.items():
        for source, target in pairwise(places):
            if source <= k < target:
                shortest = min(shortest, (target - source, number))
    distance, number = shortest
    if distance > 1:
        stops[number] = sorted({*stops[number], k, k + 1})
