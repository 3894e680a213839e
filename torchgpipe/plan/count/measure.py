"""Measure the memory that a layer takes, which is called its footprint.

The layer runs alone on device `meta`, where storages have sizes but take no memory.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from torchgpipe.balance.profile import Rehearsal
from torchgpipe.plan.count.footprint import SUMMED, Change, Footprint, Stashed
from torchgpipe.plan.count.live import Live
from torchgpipe.skip.scope import SkipKey
from torchgpipe.skip.skippable import skips_of
from torchgpipe.tensors.microbatch import tensors_of

Needs = Sequence[bool] | None


class StorageNumbers:
    """Number the storages of a whole model, so that each storage has a different number.

    In each layer's measured footprint, the storages are numbered from 0 on. The method `placed` is
    called for one layer after another, and replaces the numbers in this layer's footprint by
    numbers for the whole model.

    Args:
        inputs: How many inputs the first layer has.

    Attributes:
        next: The next free number.
        value: The numbers of the next layer's inputs.
        skips: The numbers of the skips that are stashed and not popped yet.
    """

    def __init__(self, inputs: int) -> None:
        self.next = inputs
        self.value = tuple(range(inputs))
        self.skips: dict[SkipKey, int] = {}

    def placed(self, own: Footprint, rehearsal: Rehearsal) -> Footprint:
        """Return the next layer's footprint with the storages renumbered for the whole model.

        A storage that earlier layers use, too, gets the number that it has in their footprints.

        Args:
            own: The layer's footprint, in which storages are numbered from 0 on.
            rehearsal: The layer, and the skips that it stashed in its last run.
        """
        _, pops = skips_of(rehearsal.original)
        popped = []
        for key in pops:
            number = self.skips.pop(key, None)
            if number is not None:
                popped.append(number)
        mapping: dict[int | None, Any] = {None: None, SUMMED: SUMMED}
        mapping |= zip((*own.inputs, *own.pops), (*self.value, *popped), strict=True)
        sizes = {}
        for number, nbytes in own.sizes:
            if number not in mapping:
                mapping[number] = self.next
                self.next += 1
            sizes[mapping[number]] = nbytes
        placed = mapping.__getitem__
        traces = []
        for trace in own.traces:
            changes = [Change(nbytes, placed(number)) for nbytes, number in trace]
            traces.append(tuple(changes))
        stashes = []
        for key, skip in zip(rehearsal.scope, own.stashes, strict=True):
            self.skips[key] = placed(skip.skip)
            stashes.append(skip._replace(skip=placed(skip.skip)))
        self.value = tuple(map(placed, own.outputs))
        return own._replace(
            inputs=tuple(map(placed, own.inputs)),
            pops=tuple(map(placed, own.pops)),
            outputs=self.value,
            stashes=tuple(stashes),
            saves=tuple(map(placed, own.saves)),
            sizes=tuple(sizes.items()),
            traces=tuple(traces),
        )


class _Head(torch.autograd.Function):
    """An autograd node behind a layer. In backward, it allocates the gradients of the outputs.

    In a pipeline, the backward of the next layer allocates them.
    """

    @staticmethod
    def forward(ctx: Any, live: Live, held: list[Tensor] | None, *outputs: Tensor) -> Tensor:
        ctx.live, ctx.held = live, held
        ctx.like = [(x.shape, x.dtype) for x in outputs]
        return torch.empty((), device="meta")

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        grads = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in ctx.like]
        if ctx.held is not None:
            ctx.held.extend(grads)
        ctx.live.changes.clear()  # The trace of the backward begins here.
        return (None, None, *grads)


def measure_footprint(gives: Needs, takes: Needs, rehearsal: Rehearsal) -> Footprint:
    """Run a layer on device `meta`, and return its footprint, which says what memory it takes.

    In the footprint, each storage has a number. The first numbers stand for the layer's
    inputs, the next numbers for the skips that the layer pops, and all others for the storages that
    the layer makes.

    Args:
        gives: For each input, whether the layer's backward computes the gradient of this input.
        takes: For each output, whether the next layer's backward computes the gradient of this
            output. `None` (for the last layer) means that all outputs get a gradient.
        rehearsal: The layer and its input. This function stores the layer's output in it, which is
            the input of the next layer.
    """
    layer = rehearsal.layer
    held = [*layer.parameters(), *layer.buffers()]
    with torch.no_grad():
        forward, _ = _backward(rehearsal, held, takes, hold=False)
    traces = []
    for hold in (False, True):  # whether the outputs' gradients are held until the end
        layer.zero_grad()
        for _ in range(2):  # In the second run, parameters have gradients.
            graph, trace = _backward(rehearsal, held, takes, hold=hold)
            traces.append(trace)
    layer.zero_grad()

    # One more run finds the storages. The next layer's input is the output of this run.
    value, entering = _entering(rehearsal)
    values = tensors_of(value)
    inputs = tuple([number for _, number in entering[: len(values)]])
    pops = tuple(range(len(values), len(values) + len(rehearsal.scope)))
    versions = [x._version for x in values]
    kept = rehearsal.saved(value)
    for x in held:
        kept.pop(id(x.untyped_storage()), None)
    known: dict[int, int] = {}
    sizes = dict.fromkeys(pops, 0.0)
    for x, number in entering:
        storage = x.untyped_storage()
        known[id(storage)] = number
        sizes[number] = float(storage.nbytes())

    def number_of(storage: UntypedStorage | None) -> int:
        number = known.setdefault(id(storage), len(values) + len(pops) + len(known))
        sizes[number] = 0.0 if storage is None else float(storage.nbytes())
        return number

    saves = sorted(map(number_of, kept.values()))
    results = tensors_of(rehearsal.output)
    outputs = tuple([number_of(x.untyped_storage()) for x in results])
    stashes = []
    for skip in rehearsal.scope.values():
        if skip is None:
            number = number_of(None)
            stashes.append(Stashed(number, 0.0))
        else:
            number = number_of(skip.untyped_storage())
            nbytes = float(skip.nbytes)
            grad = nbytes if skip.requires_grad else 0.0
            stashes.append(Stashed(number, sizes[number], nbytes, grad))
    return Footprint(
        inputs=inputs,
        pops=pops,
        outputs=outputs,
        stashes=tuple(stashes),
        saves=tuple(saves),
        sizes=tuple(sorted(sizes.items())),
        forward=forward,
        graph=graph,
        traces=tuple(traces),
        input_grad=_grad_bytes(values, gives),
        output_grad=_grad_bytes(results, takes),
        in_place=versions != [x._version for x in values],
    )


def _grad_bytes(tensors: Sequence[Tensor], needs: Needs) -> float:
    nbytes = 0.0
    for x, need in zip(tensors, needs or [True] * len(tensors), strict=True):
        if x.requires_grad and need:
            nbytes += x.nbytes
    return nbytes


def _entering(rehearsal: Rehearsal) -> tuple[Any, list[tuple[Tensor, int]]]:
    """Prepare a run of a layer; return the layer's input and the numbers of the input's storages.

    Returns:
        A copy of the layer's input, and a list of pairs of a tensor and the number of its storage.
        The list has the tensors of the input and the skips that the layer pops. Inputs that share a
        storage have the same number.
    """
    value = rehearsal.prepare()
    storages = []
    entering = []
    for x, given in zip(tensors_of(value), tensors_of(rehearsal.value), strict=True):
        storage = given.untyped_storage()._cdata
        storages.append(storage)
        entering.append((x, storages.index(storage)))
    for number, skip in enumerate(rehearsal.scope.values(), len(storages)):
        if skip is not None:
            entering.append((skip, number))
    return value, entering


def _backward(
    rehearsal: Rehearsal, held: Sequence[Tensor], takes: Needs, *, hold: bool
) -> tuple[float, tuple[Change, ...]]:
    """Run a layer's forward and, if gradients are on, its backward; measure the memory of both.

    No variable of this function may refer to a tensor that the layer makes. Only the autograd graph
    may refer to such tensors, so that they are freed as early as in training.

    Args:
        rehearsal: The layer and its input.
        held: The layer's parameters and buffers.
        takes: For each output, whether it gets a gradient; `None` if all outputs get a gradient.
        hold: Whether the outputs' gradients stay allocated until the backward ends.

    Returns:
        The largest number of bytes that were allocated at once in the forward, and a tuple of
        `Change` objects: the bytes that the backward allocated or freed, one after another.
    """
    live = Live()
    gradients = [x.grad for x in held if x.grad is not None]
    live.ignore([*held, *gradients])
    live.gradients = {id(grad.untyped_storage()) for grad in gradients}
    value, entering = _entering(rehearsal)
    while entering:
        live.enter(*entering.pop())
    with live:
        rehearsal.forward(value)
    graph = live.peak()
    outputs = len(tensors_of(rehearsal.output))
    # Stashed skips, which come after the outputs, always get gradients.
    roots = [
        x
        for i, x in enumerate(rehearsal.results())
        if x.requires_grad and (takes is None or i >= outputs or takes[i])
    ]
    if not roots or not torch.is_grad_enabled():
        return graph, ()
    head = _Head.apply(live, [] if hold else None, *roots)
    value = None
    roots.clear()
    rehearsal.output, rehearsal.scope = (), {}
    start = torch.empty((), device="meta")
    with live:
        head.backward(start)
    return graph, tuple(live.changes)
