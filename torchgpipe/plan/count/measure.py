"""Measure what a layer holds in memory, running it alone on `meta`, where storages have sizes but no memory."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpipe.balance.profile import Rehearsal
from torchgpipe.plan.count.alike import Alike
from torchgpipe.plan.count.footprint import SUMMED, Change, Footprint, LayerCount, Stashed
from torchgpipe.plan.count.live import ADDED, GIVEN, Live
from torchgpipe.skip.scope import SkipKey
from torchgpipe.tensors._autograd import without_torch_function
from torchgpipe.tensors.microbatch import tensors_of

Needs = Sequence[bool]
TRACES = ("first", "later", "first_held", "later_held")


class StorageNumbers:
    """Number storages as layers make them; remember the numbers of those that a later layer takes.

    Attributes:
        value: the numbers of the present layer's input, at first `inputs` new ones.
        skips: the numbers of the skips on their way.
        layers: footprints and outputs of layers that behave alike.
    """

    def __init__(self, layers: Alike, inputs: int) -> None:
        self.next = 0
        self.value = tuple(self.new() for _ in range(inputs))
        self.skips: dict[SkipKey, int] = {}
        self.layers = layers

    @property
    def alike(self) -> tuple[int, ...]:
        """Which tensors of the present value share a storage."""
        return tuple(self.value.index(x) for x in self.value)

    def new(self) -> int:
        """Return a number that no storage has."""
        self.next += 1
        return self.next

    def again(self, known: Footprint) -> Footprint:
        """Return the footprint of a layer that behaves as a known one, on the present value; go on from its output."""
        mapping: dict[int | None, Any] = {None: None, SUMMED: SUMMED}
        mapping.update(zip(known.inputs, self.value, strict=True))
        for number in (*known.outputs, *known.saves):
            if number not in mapping:
                mapping[number] = self.new()
        new: dict[str, Any] = {x: tuple(mapping[y] for y in getattr(known, x)) for x in ("inputs", "outputs", "saves")}
        new |= {x: tuple(Change(y.bytes, mapping[y.storage]) for y in getattr(known, x)) for x in TRACES}
        found = known._replace(sizes=tuple((mapping[x], nbytes) for x, nbytes in known.sizes), **new)
        self.value = found.outputs
        return found


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
        ctx.live.give(grads)
        return (None, None, *grads)


def measure_footprint(layers: Sequence[LayerCount], numbers: StorageNumbers, rehearsal: Rehearsal) -> Footprint:
    """Measure one of the `layers`, whose entering storages are in `numbers`; number those that it puts out.

    Only those of its outputs get a gradient to which the layer after it gives one.
    """
    i = rehearsal.index
    gives, takes = layers[i].gives, layers[i + 1].gives if i + 1 < len(layers) else None
    key = numbers.layers.behaviour(rehearsal.original, rehearsal.value, (numbers.alike, takes, gives))
    if key is not None and key in numbers.layers.footprints:
        known, rehearsal.output = numbers.layers.footprints[key]
        return numbers.again(known)
    layer = rehearsal.layer
    held = [*layer.parameters(), *layer.buffers()]

    with torch.no_grad():
        value, entering = _entering(rehearsal, numbers)
        live = Live()
        live.ignore([*held, *(x for x, _ in entering)])
        with live:
            rehearsal.forward(value)
    forward = live.peak()

    del live, value, entering
    run = _backward(rehearsal, numbers, held, takes)
    graph, traces = run.graph, _variants(run)
    if not run.plain:  # run each case: with and without a holder, the second time with gradients of parameters
        traces = []
        for hold in (False, True):
            for p in layer.parameters():
                p.grad = None
            for _ in range(2):
                traces.append(_variants(_backward(rehearsal, numbers, held, takes, hold=hold))[0])
    for p in layer.parameters():
        p.grad = None
    peaks: dict[str, Any] = {"forward": forward, "graph": graph, **dict(zip(TRACES, traces, strict=True))}
    result = _describe(rehearsal, numbers, held, takes, gives)._replace(**peaks)
    if key is not None:
        numbers.layers.footprints[key] = result, rehearsal.output
    return result


def _describe(
    rehearsal: Rehearsal, numbers: StorageNumbers, held: Sequence[Tensor], takes: Needs | None, gives: Needs
) -> Footprint:
    """Find what the layer takes, makes and saves, and move `numbers` on. This run's output feeds the next layer."""
    value, entering = _entering(rehearsal, numbers)
    popped = [key for key in rehearsal.scope if key in numbers.skips]
    values = tensors_of(value)
    versions = [x._version for x in values]
    kept = rehearsal.saved(value)
    known = {id(x.untyped_storage()): number for x, number in entering}
    sizes = {number: float(x.untyped_storage().nbytes()) for x, number in entering}
    for x in held:
        kept.pop(id(x.untyped_storage()), None)

    def number_of(storage: torch.UntypedStorage) -> int:
        if id(storage) not in known:
            known[id(storage)] = numbers.new()
        sizes[known[id(storage)]] = float(storage.nbytes())
        return known[id(storage)]

    saves = sorted(number_of(storage) for storage in kept.values())
    handed = tensors_of(rehearsal.output)
    outputs = tuple(number_of(x.untyped_storage()) for x in handed)
    stashed, stashes = {}, []
    for key, skip in rehearsal.scope.items():
        stashed[key] = number = numbers.new() if skip is None else number_of(skip.untyped_storage())
        grad = 0.0 if skip is None or not skip.requires_grad else float(skip.nbytes)
        stashes.append(Stashed(number, sizes.setdefault(number, 0.0), grad))
    result = Footprint(
        inputs=numbers.value,
        pops=tuple(numbers.skips[key] for key in popped),
        outputs=outputs,
        stashes=tuple(stashes),
        saves=tuple(saves),
        sizes=tuple(sorted(sizes.items())),
        input_grad=_grad_bytes(values, gives),
        output_grad=_grad_bytes(handed, takes),
        in_place=versions != [x._version for x in values],
    )
    for key in popped:
        del numbers.skips[key]
    numbers.value = outputs
    numbers.skips.update(stashed)
    return result


def _grad_bytes(tensors: Sequence[Tensor], needs: Needs | None) -> float:
    wanted = needs or [True] * len(tensors)
    return float(sum(x.nbytes for x, need in zip(tensors, wanted, strict=True) if x.requires_grad and need))


def _entering(rehearsal: Rehearsal, numbers: StorageNumbers) -> tuple[Any, list[tuple[Tensor, int]]]:
    """Return the input for a run, and each tensor that enters, skips too, with the number of its storage."""
    value = rehearsal.prepare()
    entering = list(zip(tensors_of(value), numbers.value, strict=True))
    for key, x in rehearsal.scope.items():
        if x is not None and key in numbers.skips:
            entering.append((x, numbers.skips[key]))
    return value, entering


class _Run(NamedTuple):
    """A forward and a backward: the most bytes of the first, and the trace of the second."""

    graph: float
    trace: Sequence[Change]
    plain: bool
    """Whether the same operators run if somebody else holds gradients, so that this trace tells what happens then."""


def _variants(run: _Run) -> list[tuple[Change, ...]]:
    """Return four traces: without and with earlier gradients of parameters; and both if outputs' gradients are held."""
    found = []
    for held in (False, True):
        trace = [x for x in run.trace if not (held and x.storage == GIVEN)]
        trace = [Change(x.bytes, None) if x.storage == GIVEN else x for x in trace]
        first = tuple(x for x in trace if x.storage != ADDED)
        later = tuple(Change(x.bytes, SUMMED) if x.storage == ADDED else x for x in trace)
        found += [first, later]
    return found


def _backward(
    rehearsal: Rehearsal, numbers: StorageNumbers, held: Sequence[Tensor], takes: Needs | None, *, hold: bool = False
) -> _Run:
    """Run forward and backward. Only the graph holds what they make; with `hold`, the outputs' gradients are kept."""
    live = Live()
    gradients = [p.grad for p in held if p.grad is not None]
    live.ignore([*held, *gradients])
    live.gradients = {id(grad.untyped_storage()) for grad in gradients}
    value, entering = _entering(rehearsal, numbers)
    while entering:
        live.enter(*entering.pop())
    with live:
        rehearsal.forward(value)
    graph, plain = live.peak(), True
    count = len(tensors_of(rehearsal.output))
    roots = [
        y for i, y in enumerate(rehearsal.results()) if y.requires_grad and (takes is None or i >= count or takes[i])
    ]
    if not roots:
        return _Run(graph, (), plain)

    def accumulated(p: Tensor) -> None:
        nonlocal plain
        assert p.grad is not None
        with without_torch_function():
            if p.grad.layout is torch.strided and live.taken_over(p.grad):
                live.changes.append(Change(-float(p.grad.untyped_storage().nbytes()), ADDED))
            else:
                plain = False

    hooks = [x.register_post_accumulate_grad_hook(accumulated) for x in held if x.requires_grad and x.grad is None]
    head = _Head.apply(live, [] if hold else None, *roots)
    value = None
    roots.clear()
    rehearsal.output, rehearsal.scope = (), {}
    start = torch.empty((), device="meta")
    with live:
        head.backward(start)
    for hook in hooks:
        hook.remove()
    return _Run(graph, tuple(live.changes), plain and live.given_only_read())
