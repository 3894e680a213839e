"""Cut a list of calls into layers, and find the way of each tensor from the layer that makes it to those that use it.

A layer begins where a module or function with parameters is called; what has none joins the layer before. What is
changed in place stays in one layer, from the call that makes it to the last one that changes it.

A tensor goes from layer to layer that uses it: to the next one as an output, to a later one as a skip. A layer hands on
one tensor at least, so one that is under way goes through where there would be none.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torchgpipe.trace.calls import Call, Held, Value


@dataclass
class Plan:
    """A layer to be made: its calls, and the values that enter and leave it, by number."""

    calls: list[Call]
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    pops: list[tuple[str, int]] = field(default_factory=list)
    stashes: list[tuple[str, int]] = field(default_factory=list)


def cut(calls: Sequence[Call], heavy: Sequence[bool], inputs: int, outputs: Sequence[int]) -> list[Plan]:
    """Return the layers for calls, of which those that are `heavy` begin one, with the ways of all values.

    The values below `inputs` are the module's inputs; `outputs` are what it returns.
    """
    starts = [i for i, (call, begins) in enumerate(zip(calls, heavy, strict=True)) if begins]
    glued = {i for k, call in enumerate(calls) for i in range(call.since + 1, k + 1)}
    starts = [0, *(i for i in starts[1:] if i not in glued)]
    layers = [Plan([*calls[a:b]]) for a, b in pairwise([*starts, len(calls)])]

    stops: dict[int, list[int]] = {number: [0] for number in range(inputs)}  # value -> the layers where it is
    for k, layer in enumerate(layers):
        for call in layer.calls:
            for number in (*values_in((call.args, call.kwargs)), *call.outputs):
                _stop(stops.setdefault(number, []), k)
    last = len(layers) - 1
    for number in outputs:
        _stop(stops[number], last)
    for k in range(last):
        legs = [(b - a, number) for number, at in stops.items() for a, b in pairwise(at) if a <= k < b]
        length, number = min(legs, default=(len(layers), 0))
        if length > 1:  # nothing goes from this layer to the next
            stops[number] = sorted({*stops[number], k, k + 1})

    layers[0].inputs = list(range(inputs))
    layers[-1].outputs = list(dict.fromkeys(outputs))
    for number, at in stops.items():
        for a, b in pairwise(at):
            if b == a + 1:
                layers[a].outputs.append(number)
                layers[b].inputs.append(number)
            else:
                layers[a].stashes.append((f"{number}:{a}", number))
                layers[b].pops.append((f"{number}:{a}", number))
    return layers


def values_in(value: Any) -> Iterator[int]:
    """Yield the numbers of the values in a call's arguments."""
    return (x.number for x in _leaves(value) if isinstance(x, Value))


def held_in(value: Any) -> Iterator[str]:
    """Yield the names of the module's tensors in a call's arguments."""
    return (x.name for x in _leaves(value) if isinstance(x, Held))


def _leaves(value: Any) -> Iterator[Any]:
    inner = parts(value)
    for x in inner:
        yield from _leaves(x)
    if not inner:
        yield value


def parts(value: Any) -> Sequence[Any]:
    """Return what a tuple, a list, a dictionary or a slice consists of."""
    if isinstance(value, tuple | list):
        return value
    if isinstance(value, Mapping):
        return [*value.values()]
    return (value.start, value.stop, value.step) if isinstance(value, slice) else ()


def _stop(at: list[int], layer: int) -> None:
    if not at or at[-1] < layer:
        at.append(layer)
