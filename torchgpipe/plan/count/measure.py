"""Measure what a layer holds in memory, running it alone on `meta`, where storages have sizes but no memory."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchgpipe.balance.profile import Rehearsal
from torchgpipe.plan.count.footprint import SUMMED, Change, Footprint, Stashed
from torchgpipe.plan.count.live import Live
from torchgpipe.skip.scope import SkipKey
from torchgpipe.skip.skippable import skips_of
from torchgpipe.tensors.microbatch import tensors_of

Needs = Sequence[bool] | None


class StorageNumbers:
    """Number storages over all layers, each of which counts its own from 0; remember those that a later layer takes.

    Attributes:
        value: the numbers of the present layer's input, at first `inputs` new ones.
        skips: the numbers of the skips on their way.
    """

    def __init__(self, inputs: int) -> None:
        self.next = inputs
        self.value = tuple(range(inputs))
        self.skips: dict[SkipKey, int] = {}

    def placed(self, own: Footprint, rehearsal: Rehearsal) -> Footprint:
        """Return a layer's footprint on the present value, with numbers that hold for all; go on from its output."""
        popped = [
            self.skips.pop(key) for key in skips_of(rehearsal.original)[1] if key in self.skips
        ]
        mapping: dict[int | None, Any] = {None: None, SUMMED: SUMMED}
        mapping |= zip((*own.inputs, *own.pops), (*self.value, *popped), strict=True)
        for number, _ in own.sizes:
            if number not in mapping:
                mapping[number] = self.next
                self.next += 1
        fields = ("inputs", "pops", "outputs", "saves")
        new: dict[str, Any] = {x: tuple(mapping[y] for y in getattr(own, x)) for x in fields}
        new["traces"] = tuple(
            tuple(Change(x.bytes, mapping[x.storage]) for x in trace) for trace in own.traces
        )
        new["stashes"] = tuple(x._replace(skip=mapping[x.skip]) for x in own.stashes)
        self.skips |= {key: x.skip for key, x in zip(rehearsal.scope, new["stashes"], strict=True)}
        self.value = new["outputs"]
        return own._replace(
            sizes=tuple({mapping[x]: nbytes for x, nbytes in own.sizes}.items()), **new
        )


class _Head(torch.autograd.Function):
    """In place of what comes after the layer: makes the outputs' gradients, which then only autograd holds."""

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
        ctx.live.changes.clear()  # here the trace begins
        return (None, None, *grads)


def measure_footprint(gives: Needs, takes: Needs, rehearsal: Rehearsal) -> Footprint:
    """Measure a layer, which counts storages from 0: those that enter it first, then those that it makes.

    `gives` says which of its inputs get a gradient. Only those of its outputs get one to which the layer after it gives
    one, as `takes` says; of the last layer all.
    """
    layer = rehearsal.layer
    held = [*layer.parameters(), *layer.buffers()]

    with torch.no_grad():
        forward, _ = _backward(rehearsal, held, takes, hold=False)
    traces = []
    for hold in (False, True):  # by somebody else, the outputs' gradients
        layer.zero_grad()
        for _ in range(2):  # the second time, parameters have gradients
            graph, trace = _backward(rehearsal, held, takes, hold=hold)
            traces.append(trace)
    layer.zero_grad()
    value, entering = _entering(
        rehearsal
    )  # for what the layer takes, makes and saves; this output feeds the next
    values = tensors_of(value)
    inputs = tuple(number for _, number in entering[: len(values)])
    pops = tuple(range(len(values), len(values) + len(rehearsal.scope)))
    versions = [x._version for x in values]
    kept = rehearsal.saved(value)
    known = {id(x.untyped_storage()): number for x, number in entering}
    sizes = dict.fromkeys(pops, 0.0) | {
        number: float(x.untyped_storage().nbytes()) for x, number in entering
    }
    for x in held:
        kept.pop(id(x.untyped_storage()), None)

    def number_of(storage: torch.UntypedStorage | None) -> int:
        number = known.setdefault(id(storage), len(values) + len(pops) + len(known))
        sizes[number] = 0.0 if storage is None else float(storage.nbytes())
        return number

    saves = sorted(number_of(storage) for storage in kept.values())
    handed = tensors_of(rehearsal.output)
    outputs = tuple(number_of(x.untyped_storage()) for x in handed)
    stashes = []
    for skip in rehearsal.scope.values():
        number = number_of(None if skip is None else skip.untyped_storage())
        nbytes = 0.0 if skip is None else float(skip.nbytes)
        stashes.append(
            Stashed(
                number, sizes[number], nbytes, nbytes * (skip is not None and skip.requires_grad)
            )
        )
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
        output_grad=_grad_bytes(handed, takes),
        in_place=versions != [x._version for x in values],
    )


def _grad_bytes(tensors: Sequence[Tensor], needs: Needs) -> float:
    wanted = needs or [True] * len(tensors)
    return float(
        sum(x.nbytes for x, need in zip(tensors, wanted, strict=True) if x.requires_grad and need)
    )


def _entering(rehearsal: Rehearsal) -> tuple[Any, list[tuple[Tensor, int]]]:
    """Return the input for a run, and each tensor that enters, skips too, with the number of its storage."""
    value = rehearsal.prepare()
    storages = [x.untyped_storage()._cdata for x in tensors_of(rehearsal.value)]
    numbers = [storages.index(storage) for storage in storages]
    entering = [*zip(tensors_of(value), numbers, strict=True)]
    entering += [
        (x, k) for k, x in enumerate(rehearsal.scope.values(), len(numbers)) if x is not None
    ]
    return value, entering


def _backward(
    rehearsal: Rehearsal, held: Sequence[Tensor], takes: Needs, *, hold: bool
) -> tuple[float, tuple[Change, ...]]:
    """Run forward and, if gradients are enabled, backward; return the most bytes of one, and the trace of the other.

    Only the graph holds what they make; with `hold`, the outputs' gradients are kept.
    """
    live = Live()
    gradients = [p.grad for p in held if p.grad is not None]
    live.ignore([*held, *gradients])
    live.gradients = {id(grad.untyped_storage()) for grad in gradients}
    value, entering = _entering(rehearsal)
    while entering:
        live.enter(*entering.pop())
    with live:
        rehearsal.forward(value)
    graph = live.peak()
    count = len(tensors_of(rehearsal.output))
    roots = [
        y
        for i, y in enumerate(rehearsal.results())
        if y.requires_grad and (takes is None or i >= count or takes[i])
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
