"""Cut a list of calls into layers, and find the way of each tensor from the layer that makes it to those that use it.

A layer begins where a module or function with parameters is called; what has none joins the layer before. What is
changed in place stays in one layer, from the call that makes it to the last one that changes it.

A tensor goes to the next layer that uses it as an output if that is the following layer, and as a skip if it is a later
one. `GPipe` needs an output of each layer. Where all tensors would be skips, one stops at the following layer, too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torchgpipe.trace.calls import Call, Held, Value
from torchgpipe.trace.parts import within


@dataclass
class LayerPlan:
    """A layer to be made: its calls, and the values that enter and leave it, by number."""

    calls: list[Call]
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    pops: list[tuple[str, int]] = field(default_factory=list)
    stashes: list[tuple[str, int]] = field(default_factory=list)


def cut(calls: Sequence[Call], heavy: Sequence[bool], inputs: int, outputs: Sequence[int]) -> list[LayerPlan]:
    """Return the layers for calls, of which those that are `heavy` begin one, with the ways of all values.

    The values below `inputs` are the module's inputs; `outputs` are what it returns.
    """
    starts = [i for i, (call, begins) in enumerate(zip(calls, heavy, strict=True)) if begins]
    # No layer begins between the call that makes a tensor and one that changes it.
    inside = {i for k, call in enumerate(calls) for i in range(call.since + 1, k + 1)}
    starts = [0, *(i for i in starts[1:] if i not in inside)]
    layers = [LayerPlan([*calls[a:b]]) for a, b in pairwise([*starts, len(calls)])]

    stops: dict[int, list[int]] = {number: [0] for number in range(inputs)}  # value -> the layers that make or use it
    for k, layer in enumerate(layers):
        for call in layer.calls:
            for number in (*values_in((call.args, call.kwargs)), *call.outputs):
                _add(stops.setdefault(number, []), k)
    last = len(layers) - 1
    for number in outputs:
        _add(stops[number], last)
    for k in range(last):
        passing = [(b - a, number) for number, at in stops.items() for a, b in pairwise(at) if a <= k < b]
        distance, number = min(passing, default=(len(layers), 0))
        if distance > 1:  # nothing goes from this layer to the following one
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
    return (x.number for x in within(value, Value))


def held_in(value: Any) -> Iterator[str]:
    """Yield the names of the module's tensors in a call's arguments."""
    return (x.name for x in within(value, Held))


def _add(at: list[int], layer: int) -> None:
    if not at or at[-1] < layer:
        at.append(layer)
