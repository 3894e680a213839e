"""Measure what a layer holds in memory: peaks of its forward, what it saves, and the trace of its backward.

A layer runs alone, on `meta`, where storages have sizes but no memory. Storages are noticed as operators return them
and forgotten when they die. A tensor that goes from layer to layer is one storage with one number, whoever saves it.
"""

from __future__ import annotations

import io
import pickle
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchgpipe.balance.profile import Rehearsal
from torchgpipe.microbatch import TensorOrTensors
from torchgpipe.plan.operators import tensors_in
from torchgpipe.skip.scope import SkipKey
from torchgpipe.skip.skippable import skips_of

__all__ = ["SUMMED", "Change", "Footprint", "Numbers", "behaviour", "between", "measure_footprint"]


class Change(NamedTuple):
    """Bytes that come to life or die; of which storage, where it is one that entered the layer."""

    bytes: float
    storage: int | None


Needs = Sequence[bool]

SUMMED = -1
"""In place of a storage: what dies is a parameter's gradient of this micro-batch, added to that of earlier ones."""


class Footprint(NamedTuple):
    """What one layer holds for one micro-batch. Storages are numbers; `sizes` has their bytes."""

    inputs: tuple[int, ...]
    pops: tuple[int, ...]
    outputs: tuple[int, ...]
    stashes: tuple[tuple[int, int], ...]
    """Skip, and its storage."""
    saves: tuple[int, ...]
    """What its graph keeps for backward, parameters and buffers apart."""
    sizes: tuple[tuple[int, float], ...]
    forward: float
    """The most bytes beside its inputs, without a graph."""
    graph: float
    """The most bytes beside its inputs, with a graph; what it saves is among them."""
    first: tuple[Change, ...]
    """Backward, from where the outputs' gradients are there, if parameters have no gradients yet."""
    later: tuple[Change, ...]
    """Backward, if they have."""
    first_held: tuple[Change, ...]
    """Backward, if parameters have no gradients yet and somebody holds the outputs' gradients until its end."""
    later_held: tuple[Change, ...]
    input_grad: float
    """Bytes of the gradients that it hands to the layer before."""
    output_grad: float
    """Bytes of the gradients of its output, those of stashed skips apart."""
    pop_grads: tuple[float, ...]
    stash_grads: tuple[float, ...]


class Numbers:
    """Hand out numbers to storages, and remember those that wait: the present value's, and the skips'."""

    def __init__(self) -> None:
        self.next = 0
        self.value: tuple[int, ...] = ()
        self.skips: dict[SkipKey, int] = {}
        self.known: dict[object, tuple[Footprint, TensorOrTensors]] = {}
        """Footprints and outputs of layers that behave alike, by what tells them apart."""

    @property
    def alike(self) -> tuple[int, ...]:
        """Which tensors of the present value share a storage."""
        return tuple(self.value.index(x) for x in self.value)

    def new(self) -> int:
        """Return a number that no storage has."""
        self.next += 1
        return self.next


class _Live(TorchDispatchMode):
    """Note every storage that comes to life or dies in this thread."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.changes: list[Change] = []
        self._known: set[int] = set()
        self.gradients: set[int] = set()
        """The storages of the parameters' gradients."""
        self._summed: set[int] = set()

    def ignore(self, tensors: Sequence[Tensor]) -> None:
        """Count neither life nor death of tensors that the caller holds anyway."""
        self._known.update(id(x.untyped_storage()) for x in tensors)

    def enter(self, x: Tensor | None, number: int) -> None:
        """Note the death of a storage that entered the layer."""
        if x is not None:
            self._watch(x.untyped_storage(), number)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        in_place = func is torch.ops.aten.add_.Tensor and isinstance(args[1], Tensor)
        if in_place and id(args[0].untyped_storage()) in self.gradients:
            self._summed.add(id(args[1].untyped_storage()))
        for x in tensors_in(result):
            storage = x.untyped_storage()
            if id(storage) not in self._known:
                self.changes.append(Change(float(storage.nbytes()), None))
                self._watch(storage, None)
        return result

    def _watch(self, storage: torch.UntypedStorage, number: int | None) -> None:
        if id(storage) in self._known:
            return
        self._known.add(id(storage))
        weakref.finalize(storage, self._forget, id(storage), float(storage.nbytes()), number).atexit = False

    def _forget(self, key: int, nbytes: float, number: int | None) -> None:
        self._known.discard(key)
        self.changes.append(Change(-nbytes, SUMMED if key in self._summed else number))
        self._summed.discard(key)

    def peak(self) -> float:
        """Return the most bytes since it began."""
        live = most = 0.0
        for change in self.changes:
            live += change.bytes
            most = max(most, live)
        return most


class _Head(torch.autograd.Function):
    """What comes after the layer: makes the outputs' gradients, which then belong to the engine alone."""

    @staticmethod
    def forward(ctx: Any, live: _Live, keep: list[Tensor] | None, *outputs: Tensor) -> Tensor:
        ctx.live, ctx.keep = live, keep
        ctx.like = [(x.shape, x.dtype) for x in outputs]
        return torch.empty((), device="meta")

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        grads = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in ctx.like]
        if ctx.keep is not None:
            ctx.keep.extend(grads)
        ctx.live.changes.clear()  # the trace begins here
        return (None, None, *grads)


def measure_footprint(
    rehearsal: Rehearsal, numbers: Numbers, skips: Mapping[SkipKey, int], *, takes: Needs | None, gives: Needs
) -> Footprint:
    """Measure the layer of `rehearsal`, whose entering storages are in `numbers`; number those that it puts out.

    `takes` says which of its outputs get a gradient from the layer after it (`None`: all), `gives` which of its inputs
    get one from it.
    """
    layer = rehearsal.layer
    key = behaviour(layer, rehearsal.prepare(), (numbers.alike, takes, gives))
    if key is not None and key in numbers.known:
        known, rehearsal.output = numbers.known[key]
        return _renumbered(known, numbers)
    held = [*layer.parameters(), *layer.buffers()]

    with torch.no_grad():
        live, value, _ = _prepared(rehearsal, numbers, held)
        with live:
            rehearsal.forward(value)
    forward = live.peak()

    live, value, _ = _prepared(rehearsal, numbers, held)
    with live:
        rehearsal.forward(value)
    graph = live.peak()
    del live, value

    result, popped = _describe(rehearsal, numbers, skips, held, takes, gives)
    entered = (result.inputs, popped, result.pops)
    traces = []
    for keep_grads in (False, True):
        for p in layer.parameters():
            p.grad = None
        traces += [_backward(rehearsal, entered, held, keep_grads, takes) for _ in ("first", "later")]
    for p in layer.parameters():
        p.grad = None
    rehearsal.forward(rehearsal.prepare())  # whose output feeds the next layer
    first, later, first_held, later_held = traces
    result = result._replace(
        forward=forward, graph=graph, first=first, later=later, first_held=first_held, later_held=later_held
    )
    if key is not None:
        numbers.known[key] = result, rehearsal.output
    return result


def behaviour(layer: torch.nn.Module, value: Any, more: object = None) -> object:
    """Return what is equal for layers that behave alike: all their state but the contents of tensors.

    `None` for layers with skips, and for those that cannot be pickled, which may do anything.
    """
    if any(skips_of(layer)):
        return None
    written = io.BytesIO()
    try:
        _Shapes(written).dump((layer, _flat(value), more))
    except Exception:
        return None
    return written.getvalue()


class _Shapes(pickle.Pickler):
    """Write no tensor, only what it looks like."""

    def persistent_id(self, item: object) -> object:
        if not isinstance(item, Tensor):
            return None
        return str((item.shape, item.dtype, item.stride(), item.requires_grad, item.untyped_storage().nbytes()))


def _renumbered(known: Footprint, numbers: Numbers) -> Footprint:
    """Return the footprint of an earlier layer like this one, with this one's storages."""
    mapping = dict(zip(known.inputs, numbers.value, strict=True))
    mapping[SUMMED] = SUMMED
    for number in [*known.outputs, *known.saves]:
        if number not in mapping:
            mapping[number] = numbers.new()

    def trace(changes: Sequence[Change]) -> tuple[Change, ...]:
        return tuple(Change(x.bytes, None if x.storage is None else mapping[x.storage]) for x in changes)

    numbers.value = tuple(mapping[x] for x in known.outputs)
    return known._replace(
        inputs=tuple(mapping[x] for x in known.inputs),
        outputs=numbers.value,
        saves=tuple(mapping[x] for x in known.saves),
        sizes=tuple((mapping[x], nbytes) for x, nbytes in known.sizes),
        first=trace(known.first),
        later=trace(known.later),
        first_held=trace(known.first_held),
        later_held=trace(known.later_held),
    )


def _describe(
    rehearsal: Rehearsal,
    numbers: Numbers,
    skips: Mapping[SkipKey, int],
    held: Sequence[Tensor],
    takes: Needs | None,
    gives: Needs,
) -> tuple[Footprint, list[SkipKey]]:
    """Find what the layer takes, makes and saves; return that and the skips it pops, and move `numbers` on."""
    _, value, entering = _prepared(rehearsal, numbers, held)
    popped = [key for key in rehearsal.scope if key in numbers.skips]
    pop_needs = [x is not None and x.requires_grad for x in rehearsal.scope.values()]
    pop_bytes = [0 if x is None else x.nbytes for x in rehearsal.scope.values()]
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(x: Tensor) -> Tensor:
        if x.layout is torch.strided:
            kept[id(x.untyped_storage())] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        rehearsal.forward(value)
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
    handed = _flat(rehearsal.output)
    outputs = tuple(number_of(x.untyped_storage()) for x in handed)
    stashed = [(key, x) for key, x in rehearsal.scope.items()]
    stash_numbers = {key: numbers.new() if x is None else number_of(x.untyped_storage()) for key, x in stashed}
    for key, tensor in stashed:
        sizes.setdefault(stash_numbers[key], 0.0 if tensor is None else float(tensor.nbytes))
    values = _flat(value)
    result = Footprint(
        inputs=numbers.value,
        pops=tuple(numbers.skips[key] for key in popped),
        outputs=outputs,
        stashes=tuple((skips[key], stash_numbers[key]) for key, _ in stashed),
        saves=tuple(saves),
        sizes=tuple(sorted(sizes.items())),
        forward=0.0,
        graph=0.0,
        first=(),
        later=(),
        first_held=(),
        later_held=(),
        input_grad=_grad_bytes(values, gives),
        output_grad=_grad_bytes(handed, takes),
        pop_grads=tuple(float(n) if need else 0.0 for n, need in zip(pop_bytes, pop_needs, strict=True)),
        stash_grads=tuple(0.0 if x is None or not x.requires_grad else float(x.nbytes) for _, x in stashed),
    )
    for key in popped:
        del numbers.skips[key]
    numbers.value = outputs
    numbers.skips.update(stash_numbers)
    return result, popped


def _grad_bytes(tensors: Sequence[Tensor], needs: Needs | None) -> float:
    wanted = needs or [True] * len(tensors)
    return float(sum(x.nbytes for x, need in zip(tensors, wanted, strict=True) if x.requires_grad and need))


def _prepared(
    rehearsal: Rehearsal, numbers: Numbers, held: Sequence[Tensor]
) -> tuple[_Live, Any, list[tuple[Tensor, int]]]:
    value = rehearsal.prepare()
    live = _Live()
    live.ignore(held)
    entering = list(zip(_flat(value), numbers.value, strict=True))
    for key, x in rehearsal.scope.items():
        if x is not None and key in numbers.skips:
            entering.append((x, numbers.skips[key]))
    live.ignore([x for x, _ in entering])
    return live, value, entering


def _backward(
    rehearsal: Rehearsal,
    entered: tuple[tuple[int, ...], list[SkipKey], tuple[int, ...]],
    held: Sequence[Tensor],
    keep_grads: bool,
    takes: Needs | None,
) -> tuple[Change, ...]:
    """Trace a backward of which nothing but its own graph holds anything, the outputs' gradients as asked."""
    live = _Live()
    gradients = [p.grad for p in held if p.grad is not None]
    live.ignore([*held, *gradients])
    live.gradients = {id(grad.untyped_storage()) for grad in gradients}
    value: Any = rehearsal.prepare()
    entering = list(zip([*_flat(value), *(rehearsal.scope[key] for key in entered[1])], [*entered[0], *entered[2]],
                        strict=True))  # fmt: skip
    while entering:
        live.enter(*entering.pop())
    with live:
        rehearsal.forward(value)
    count = len(_flat(rehearsal.output))
    roots = [
        y for i, y in enumerate(rehearsal.results()) if y.requires_grad and (takes is None or i >= count or takes[i])
    ]
    if not roots:
        return ()
    kept_grads: list[Tensor] | None = [] if keep_grads else None
    head = _Head.apply(live, kept_grads, *roots)
    value = None
    roots.clear()
    rehearsal.output, rehearsal.scope = (), {}
    start = torch.empty((), device="meta")
    with live:
        head.backward(start)
    return tuple(live.changes)


def _flat(value: Any) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else tuple(value)


def between(a: Footprint, b: Footprint, share: float) -> Footprint:
    """Return what lies on the straight line from `a` to `b`; whole bytes stay whole."""

    def line(x: float, y: float) -> float:
        return x + (y - x) * share

    def lines(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, ...]:
        return tuple(line(x, y) for x, y in zip(xs, ys, strict=True))

    def trace(xs: Sequence[Change], ys: Sequence[Change]) -> tuple[Change, ...]:
        if [x.storage for x in xs] != [y.storage for y in ys]:
            raise ValueError("a layer holds its memory in different orders for different batch sizes")
        return tuple(Change(line(x.bytes, y.bytes), x.storage) for x, y in zip(xs, ys, strict=True))

    return a._replace(
        sizes=tuple((i, line(x, y)) for (i, x), (_, y) in zip(a.sizes, b.sizes, strict=True)),
        forward=line(a.forward, b.forward),
        graph=line(a.graph, b.graph),
        first=trace(a.first, b.first),
        later=trace(a.later, b.later),
        first_held=trace(a.first_held, b.first_held),
        later_held=trace(a.later_held, b.later_held),
        input_grad=line(a.input_grad, b.input_grad),
        output_grad=line(a.output_grad, b.output_grad),
        pop_grads=lines(a.pop_grads, b.pop_grads),
        stash_grads=lines(a.stash_grads, b.stash_grads),
    )
