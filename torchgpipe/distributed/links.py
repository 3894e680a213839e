"""A program's links to those of other ranks, over wires."""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchgpipe.distributed.connections import Connections
from torchgpipe.distributed.wires.wire import Receiver, Sender
from torchgpipe.engine.program import Links
from torchgpipe.engine.relay import Stopped
from torchgpipe.skip.layout import Crossing
from torchgpipe.task.seeds import Seeds
from torchgpipe.task.task_graph import leaves
from torchgpipe.tensors.item import Item
from torchgpipe.tensors.microbatch import Flat


class Messages(Links):
    """A program's links over wires, in one mini-batch's forward or backward; see `torchgpipe.engine.program.Links`."""

    kind: str
    step: int

    def __init__(self, connections: Connections, crossings: Sequence[Crossing]) -> None:
        own = connections.own
        before, after = own - self.step, own + self.step
        self._connections = connections
        # `Any`: a program asks for nothing before the first rank, and for nothing after the last.
        self._before: Any = connections.wire(Receiver, self.kind, before) if 0 <= before < connections.n else None
        self._after: Any = connections.wire(Sender, self.kind, after) if 0 <= after < connections.n else None
        self._between: dict[int, list[Crossing]] = defaultdict(list)  # this rank and another
        for crossing in crossings:
            if own in (crossing.source, crossing.target):
                self._between[self._other(crossing)].append(crossing)
        skips = [self._skips(Sender if (other - own) * self.step > 0 else Receiver, other) for other in self._between]
        for end in (self._before, self._after, *skips):
            if end is not None:
                end.begin()
        self._left: dict[int, dict[Crossing, tuple[Hashable, Tensor | None]]] = defaultdict(dict)
        self._arrived: dict[Crossing, tuple[Any, Tensor | None]] = {}

    def check(self) -> None:
        if self._connections.liveness.stopped:
            raise Stopped

    def admit(self) -> None:
        self._after.settle()

    def announce(self) -> None:
        self._connections.give(self._after, "soon", ())

    def expect(self) -> None:
        self._connections.take(self._before)

    def _leave(self, crossing: Crossing, about: Hashable, tensor: Tensor | None) -> None:
        # All skips of a micro-batch for one rank are one message. They are fetched in another order than they are left.
        other = self._other(crossing)
        left, between = self._left[other], self._between[other]
        left[crossing] = about, tensor
        if len(left) == len(between):
            abouts, skips = zip(*(left[each] for each in between), strict=True)
            sender = self._skips(Sender, other)
            sender.settle(abs(other - self._connections.own))
            self._connections.give(sender, abouts, skips)
            left.clear()

    def _fetch(self, crossing: Crossing) -> tuple[Any, Tensor | None]:
        if crossing not in self._arrived:
            other = self._other(crossing)
            abouts, skips = self._connections.take(self._skips(Receiver, other))
            self._arrived.update(zip(self._between[other], zip(abouts, skips, strict=True), strict=True))
        return self._arrived.pop(crossing)

    def _other(self, crossing: Crossing) -> int:
        return crossing.target if crossing.source == self._connections.own else crossing.source

    def _skips(self, end: Any, other: int) -> Any:
        return self._connections.wire(end, f"{self.kind} skips", other)


class Forward(Messages):
    """The links of a forward, whose items are micro-batches.

    With a micro-batch goes whether any partition so far has drawn random numbers. With `in_order`, tasks run one after
    another, and the state of the default generator goes with it, too.
    """

    kind, step = "forward", 1

    def __init__(
        self, connections: Connections, crossings: Sequence[Crossing], seeds: Seeds, *, in_order: bool
    ) -> None:
        super().__init__(connections, crossings)
        self._seeds, self._in_order = seeds, in_order

    def give(self, item: Item) -> None:
        state = (torch.get_rng_state(),) if self._in_order else ()
        self._connections.give(self._after, (*_about(item), self._seeds.drew), (*item.flat, *state))

    def take(self) -> Item:
        (*about, drew), tensors = self._connections.take(self._before)
        self._seeds.drew = self._seeds.drew or drew
        if self._in_order:
            state, tensors = tensors[-1], tensors[:-1]
            assert state is not None
            torch.set_rng_state(state.cpu())
        return _item(about, tensors)

    def leave(self, i: int, crossing: Crossing, skip: Item) -> None:
        self._leave(crossing, _about(skip), *skip.flat)

    def fetch(self, i: int, crossing: Crossing) -> Item:
        about, skip = self._fetch(crossing)
        return _item(about, (skip,))


class Backward(Messages):
    """The links of a backward, whose items are gradients."""

    kind, step = "backward", -1

    def give(self, grads: Flat) -> None:
        self._connections.give(self._after, "gradients", grads)

    def take(self) -> Flat:
        return self._connections.take(self._before)[1]

    def leave(self, i: int, crossing: Crossing, grad: Tensor | None) -> None:
        self._leave(crossing, "gradient", grad)

    def fetch(self, i: int, crossing: Crossing) -> Tensor | None:
        return self._fetch(crossing)[1]


def _about(item: Item) -> tuple[Hashable, ...]:
    return item.atomic, item.shared, tuple([x is not None and x.requires_grad for x in item.flat])


def _item(about: Sequence[Any], tensors: Sequence[Tensor | None]) -> Item:
    atomic, shared, needs = about
    return Item(leaves(tuple(tensors), needs), atomic, shared)
