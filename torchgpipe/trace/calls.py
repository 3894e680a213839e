"""What a recording consists of: calls, and what stands for tensors in their arguments. How they are cut into layers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor

from torchgpipe.trace.parts import Slots, within


@dataclass(frozen=True)
class Value:
    """A tensor that is an input, or that a call returned, by its number."""

    number: int


@dataclass(frozen=True)
class Held:
    """A parameter, a buffer, or another tensor that the module holds, by its name."""

    name: str


@dataclass(frozen=True)
class Device:
    """The device of the module, wherever that is."""


class Call(NamedTuple):
    """One call: of a function, or of the submodule of that name, with `Value`, `Held` and `Device` in its arguments.

    `outputs` are the numbers of the tensors that it returns, in their order. In a layer, those in `spent` are not used
    any more after it. `caller` names the module whose forward calls. The call `since`, or -1 for an input, made what
    this one changes in place: both have to run on one device.
    """

    target: Callable[..., Any] | str
    args: Any
    kwargs: Any
    outputs: tuple[int, ...]
    grad: bool  # whether gradients are recorded
    spent: tuple[int, ...] = ()
    caller: str = ""
    since: int = -1
    where: tuple[str, int] = ("", 0)


class BatchSize(NamedTuple):
    """Where a layer reads the batch size: a value, one of its dimensions, and how long that is for one sample."""

    value: int
    dimension: int
    each: int


@dataclass
class Recording:
    """What a module did with inputs of one batch size.

    `shapes` are those of all values, by number; the inputs come first. `result` is what it returned, and the slots in
    it, for the values in `outputs`. `extra` has tensors by name that are neither parameters nor buffers. `state` says
    in what it was unlike the first recordings, such as the mode.
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
    """A layer to be made: its name, its calls, and the values that enter and leave it, by number.

    `batch` says where to find the batch size, if a call needs it.
    """

    name: str
    calls: list[Call]
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    pops: list[tuple[str, int]] = field(default_factory=list)
    stashes: list[tuple[str, int]] = field(default_factory=list)
    batch: BatchSize | None = None


def cut(
    calls: Sequence[Call], names: Sequence[str], inputs: int, outputs: Sequence[int]
) -> list[LayerPlan]:
    """Return the layers for calls, of which those that have `names` begin one, with the ways of all values.

    What has no name joins the layer before. What is changed in place stays in one layer, from the call that makes it to
    the last one that changes it.

    A tensor goes to the next layer that uses it as an output if that is the following layer, and as a skip if it is a
    later one. `GPipe` needs an output of each layer. Where all tensors would be skips, one stops at the following
    layer, too.

    The values below `inputs` are the module's inputs; `outputs` are what it returns.
    """
    starts = [i for i, name in enumerate(names) if name]
    # No layer begins between the call that makes a tensor and one that changes it.
    inside = {i for k, call in enumerate(calls) for i in range(call.since + 1, k + 1)}
    starts = [0, *(i for i in starts[1:] if i not in inside)]
    ends = pairwise([*starts, len(calls)])
    layers = [LayerPlan(next(filter(None, names[a:b]), ""), [*calls[a:b]]) for a, b in ends]

    # Of each value, the layers that make or use it, in order.
    stops: dict[int, dict[int, None]] = {number: {0: None} for number in range(inputs)}
    for k, layer in enumerate(layers):
        for call in layer.calls:
            for number in (
                *[x.number for x in within((call.args, call.kwargs), Value)],
                *call.outputs,
            ):
                stops.setdefault(number, {})[k] = None
    last = len(layers) - 1
    for number in outputs:
        stops[number][last] = None
    for k in range(last):
        passing = [
            (b - a, number) for number, at in stops.items() for a, b in pairwise(at) if a <= k < b
        ]
        distance, number = min(passing, default=(len(layers), 0))
        if distance > 1:  # nothing goes from this layer to the following one
            stops[number] = dict.fromkeys(sorted({*stops[number], k, k + 1}))

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
