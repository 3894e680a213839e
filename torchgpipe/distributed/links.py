"""A program's links to those of other ranks, over wires."""

import sys
from collections import defaultdict
from collections.abc import Hashable, Sequence
from functools import reduce
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from torchgpipe.distributed.connections import Connections
from torchgpipe.distributed.wires.wire import Receiver, Sender
from torchgpipe.engine.program import Links
from torchgpipe.engine.relay import Stopped
from torchgpipe.engine.seeds import Seeds
from torchgpipe.plain import packed, unpacked
from torchgpipe.skip.layout import Crossing
from torchgpipe.task.task_graph import leaves
from torchgpipe.tensors.item import Item
from torchgpipe.tensors.microbatch import Flat, Form


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
        self._left: dict[int, dict[Crossing, tuple[Hashable, Flat]]] = defaultdict(dict)
        self._arrived: dict[Crossing, tuple[Any, Flat]] = {}

    def check(self) -> None:
        if self._connections.liveness.stopped:
            raise Stopped

    def admit(self) -> None:
        self._after.settle()

    def announce(self) -> None:
        self._connections.give(self._after, "soon", ())

    def expect(self) -> None:
        self._connections.take(self._before)

    def _leave(self, crossing: Crossing, about: Hashable, tensors: Flat) -> None:
        # All skips of a micro-batch for one rank are one message. They are fetched in another order than they are left.
        other = self._other(crossing)
        left, between = self._left[other], self._between[other]
        left[crossing] = about, tensors
        if len(left) == len(between):
            abouts, skips = zip(*(left[each] for each in between), strict=True)
            sender = self._skips(Sender, other)
            sender.settle(abs(other - self._connections.own))
            self._connections.give(sender, abouts, tuple(chain(*skips)))
            left.clear()

    def _fetch(self, crossing: Crossing) -> tuple[Any, Flat]:
        if crossing not in self._arrived:
            other = self._other(crossing)
            abouts, tensors = self._connections.take(self._skips(Receiver, other))
            each = len(tensors) // len(abouts)
            for k, arrived in enumerate(self._between[other]):
                self._arrived[arrived] = abouts[k], tensors[k * each :][:each]
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
        about, tensors = self._packed(item)
        self._connections.give(self._after, (*about, self._seeds.drew), (*tensors, *state))

    def take(self) -> Item:
        (*about, drew), tensors = self._connections.take(self._before)
        self._seeds.drew = self._seeds.drew or drew
        if self._in_order:
            state, tensors = tensors[-1], tensors[:-1]
            assert state is not None
            torch.set_rng_state(state.cpu())
        return _item(about, tensors)

    def leave(self, i: int, crossing: Crossing, skip: Item) -> None:
        self._leave(crossing, *self._packed(skip))

    def fetch(self, i: int, crossing: Crossing) -> Item:
        return _item(*self._fetch(crossing))

    def _packed(self, item: Item) -> tuple[tuple[Hashable, ...], Flat]:
        """Return what is said of an item, and its tensors with their attributes, if there are any."""
        name = f"{item.form.__module__}:{item.form.__qualname__}"
        _form_of(name)  # it raises here rather than there
        attributes = [{} if x is None else vars(x) for x in item.flat]
        try:
            told = packed(attributes) if any(attributes) else None
        except TypeError as error:
            raise TypeError(
                f"outputs of partition {self._connections.own} have attributes "
                f"({', '.join({}.fromkeys(chain(*attributes)))}), but {error}; return a tensor as an output of its own"
            ) from None
        needs = tuple([x is not None and x.requires_grad for x in item.flat])
        return (name, item.shared, needs), (*item.flat, told)


class Backward(Messages):
    """The links of a backward, whose items are gradients."""

    kind, step = "backward", -1

    def give(self, grads: Flat) -> None:
        self._connections.give(self._after, "gradients", grads)

    def take(self) -> Flat:
        return self._connections.take(self._before)[1]

    def leave(self, i: int, crossing: Crossing, grad: Tensor | None) -> None:
        self._leave(crossing, "gradient", (grad,))

    def fetch(self, i: int, crossing: Crossing) -> Tensor | None:
        return self._fetch(crossing)[1][0]


def _item(about: Sequence[Any], tensors: Flat) -> Item:
    name, shared, needs = about
    *flat, told = tensors
    for x, attributes in zip(flat, unpacked(told), strict=True) if told is not None else ():
        if x is not None:
            vars(x).update(attributes)
    return Item(leaves(tuple(flat), needs), _form_of(name), shared)


def _form_of(name: str) -> Form:
    """Return the class of this name, `Tensor` or one of tuples, that a module which is imported here has."""
    module, _, path = name.partition(":")
    found = reduce(lambda owner, part: getattr(owner, part, None), path.split("."), sys.modules.get(module))
    if not (isinstance(found, type) and issubclass(found, Tensor | tuple)):
        raise TypeError(f"a layer returned a {name}, which ranks do not find; define the class at the top of a module")
    return found
