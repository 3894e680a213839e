"""What one layer holds in memory, as numbers: peaks, what it saves, and the trace of its backward.

A tensor that goes from layer to layer is one storage with one number, whoever saves it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ["SUMMED", "Change", "Footprint", "between", "renumbered"]


class Change(NamedTuple):
    """Bytes that come to life or die; of which storage, where it is one that entered the layer."""

    bytes: float
    storage: int | None


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
    in_place: bool
    """Whether it changes its input."""


def renumbered(known: Footprint, mapping: Mapping[int, int]) -> Footprint:
    """Return the footprint of a layer that behaves alike, with its own storages, by the known one's."""

    def storage(number: int | None) -> int | None:
        return number if number is None or number == SUMMED else mapping[number]

    def trace(changes: Sequence[Change]) -> tuple[Change, ...]:
        return tuple(Change(x.bytes, storage(x.storage)) for x in changes)

    return known._replace(
        inputs=tuple(mapping[x] for x in known.inputs),
        outputs=tuple(mapping[x] for x in known.outputs),
        saves=tuple(mapping[x] for x in known.saves),
        sizes=tuple((mapping[x], nbytes) for x, nbytes in known.sizes),
        first=trace(known.first),
        later=trace(known.later),
        first_held=trace(known.first_held),
        later_held=trace(known.later_held),
    )


def between(a: Footprint, b: Footprint, share: float) -> Footprint:
    """Return what lies on the straight line from `a` to `b`; whole bytes stay whole."""

    def line(x: float, y: float) -> float:
        return x + (y - x) * share

    def lines(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, ...]:
        return tuple(line(x, y) for x, y in zip(xs, ys, strict=True))

    known: dict[tuple[int, int], tuple[Change, ...]] = {}  # many layers have one trace in several places

    def trace(xs: Sequence[Change], ys: Sequence[Change]) -> tuple[Change, ...]:
        if (id(xs), id(ys)) not in known:
            known[id(xs), id(ys)] = changes(xs, ys)
        return known[id(xs), id(ys)]

    def changes(xs: Sequence[Change], ys: Sequence[Change]) -> tuple[Change, ...]:
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
