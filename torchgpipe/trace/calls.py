"""The calls recorded in a module's forward, and the function `cut`, which cuts them into layers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from torchgpipe.trace.code.call import Call, Value
from torchgpipe.trace.code.sizes import Size, Sizes, fitted
from torchgpipe.trace.code.source import SizeRead
from torchgpipe.trace.parts import Slots, within
from torchgpipe.trace.refuse import refused


@dataclass
class RecordedCalls:
    """A recording: the calls that a module's forward made for inputs of one size, and its result.

    Tensors have numbers: first the inputs, then the tensors that calls returned, in order.

    Attributes:
        sizes: The batch size, and the length of each dimension whose length may change.
        calls: The calls, in order.
        shapes: The shape of each tensor, by its number.
        result: What the module returned, with slots (placeholders) in place of tensors; and the
            object that puts tensors into these slots.
        outputs: For each slot, the number of its tensor.
        extra: Maps new names to the tensors that the module uses although they are neither its
            parameters nor its buffers.
        state: A text for error messages with the mode (training or evaluation) and the autocast of
            this recording. It is empty if both are the same as in the first recordings.
    """

    sizes: Sizes
    calls: list[Call]
    shapes: list[tuple[int, ...]]
    result: tuple[Any, Slots]
    outputs: tuple[int, ...]
    extra: dict[str, Tensor]
    state: str = ""


@dataclass
class LayerPlan:
    """The plan of a layer: its calls, and the numbers of the tensors that enter and leave it.

    Each tensor in the recorded forward of a module has a number. Skips are skip connections.

    Attributes:
        name: The layer's name.
        calls: The calls that the layer makes.
        inputs: The numbers of the tensors from the previous layer.
        outputs: The numbers of the tensors for the next layer.
        pops: The names of the skips that enter the layer, and the numbers of their tensors.
        stashes: The names of the skips that leave the layer, and the numbers of their tensors.
        sizes: How the layer finds the batch size and the lengths that its calls need, from the
            shapes of its tensors.
    """

    name: str
    calls: list[Call]
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    pops: list[tuple[str, int]] = field(default_factory=list)
    stashes: list[tuple[str, int]] = field(default_factory=list)
    sizes: list[SizeRead] = field(default_factory=list)

    def steps(self) -> list[Call]:
        """Return the layer's calls, and note in each call which tensors can be freed after it.

        A tensor can be freed if no later call uses it and the layer does not return it. The numbers
        of these tensors are in the call's field `spent`.
        """
        needed = {*self.outputs, *dict(self.stashes).values()}
        steps: list[Call] = []
        for call in reversed(self.calls):
            used = {value.number for value in within((call.args, call.kwargs), Value)}
            used.update(call.outputs)
            if call is self.calls[0]:
                used.update(self.inputs, dict(self.pops).values())
            steps.append(call._replace(spent=tuple(sorted(used - needed))))
            needed |= used
        steps.reverse()
        return steps


Stops = dict[int, list[int]]
"""Maps a tensor's number to the indices of the layers that make, use or pass it, in order."""


def cut(
    calls: Sequence[Call], names: Sequence[str], inputs: int, outputs: Sequence[int]
) -> list[LayerPlan]:
    """Cut the calls of a module into layers, and find how tensors go from layer to layer.

    A layer begins with a call that has a name in `names`. A call without a name is in the same
    layer as the call before it. If a call makes a tensor and later calls change this tensor in
    place, all calls from the first to the last of these calls are in one layer.

    A tensor goes from the layer that makes it to the next layer that uses it, and so on. For
    example, layer 2 makes a tensor, and layers 3 and 6 use it. Then the tensor is an output of
    layer 2 to layer 3, which passes it on to layer 6 as a skip.

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
    """Cut the calls into layers; return a `LayerPlan` for each, with only its name and its calls.

    Args:
        calls: The calls.
        names: For each call, the name of the layer that may begin with it, or "".
    """
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
    """Find, for each tensor, the layers that make it, use it, or only hand it on.

    Args:
        layers: The plans of the layers.
        inputs: How many inputs the module has.
        outputs: The numbers of the tensors that the module returns.

    Returns:
        A dictionary from the number of each tensor to a list of the indices of these layers.
    """
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
    """Make sure that layer `k` has an output for layer `k` + 1, because `GPipe` needs one.

    A tensor that passes over at least one layer is a skip (skip connection). If all tensors that
    layer `k` or earlier layers make for later layers are skips, layer `k` has no output for the
    next layer. Then layers `k` and `k` + 1 pass on the tensor of the shortest of these skips.

    Args:
        stops: For each tensor, the layers that make it, use it, or only hand it on. This function
            can add the layers `k` and `k` + 1 for one tensor.
        k: The index of the layer.
        layers: The number of layers.
    """
    shortest = (layers, 0)
    for number, places in stops.items():
        for source, target in pairwise(places):
            if source <= k < target:
                shortest = min(shortest, (target - source, number))
    distance, number = shortest
    if distance > 1:
        stops[number] = sorted({*stops[number], k, k + 1})


def sizes_read(
    root: nn.Module, plan: LayerPlan, recordings: Sequence[RecordedCalls], names: Sequence[str]
) -> list[SizeRead]:
    """Find out from which dimensions of its inputs a layer reads the sizes that its calls need.

    A size is the batch size, or a length that may change from call to call.

    Args:
        root: The traced module.
        plan: The plan of the layer.
        recordings: Recordings of the module for several sizes. The shapes in them show which
            dimensions depend on which size.
        names: The names of the sizes, for the error message.

    Raises:
        Untraceable: If a call needs a size that no input of the layer shows.
    """
    needed: set[int] = set()
    for call in plan.calls:
        for number in within((call.args, call.kwargs), Size):
            needed |= number.uses
    found: list[SizeRead] = []
    for k in sorted(needed):
        read = _size_read(k, plan, recordings)
        if read is None:
            of = "a batch dimension" if k == 0 else f"a dimension of {names[k]}"
            raise refused(
                root,
                plan.calls[0].where,
                f"a layer would begin here, but none of its input tensors has {of}",
                "keep a larger submodule as one layer: sequential(…, whole=[…])",
            )
        found.append(read)
    return found


def _size_read(k: int, plan: LayerPlan, recordings: Sequence[RecordedCalls]) -> SizeRead | None:
    """Return a dimension of a layer's inputs from which the size with index `k` is read, or `None`.

    Args:
        k: 0 for the batch size, or else the index of a length that may change.
        plan: The plan of the layer.
        recordings: Recordings of the module for several sizes.
    """
    points = [recording.sizes for recording in recordings]
    for number in (*plan.inputs, *dict(plan.pops).values()):
        shapes = [recording.shapes[number] for recording in recordings]
        for dimension, lengths in enumerate(zip(*shapes, strict=False)):
            formula = fitted(lengths, points)
            if formula is None or formula.uses != {k} or formula.over != 1:
                continue
            terms = {chosen: factor for factor, chosen in formula.terms}
            return SizeRead(k, number, dimension, terms[(k,)], terms.get((), 0))
    return None
