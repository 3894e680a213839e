"""A program's links to those of other ranks, over wires."""

import sys
from ast import literal_eval
from collections import defaultdict
from collections.abc import Hashable, Sequence
from contextlib import suppress
from functools import reduce
from itertools import chain
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
        self._left: dict[int, dict[Crossing, tuple[Hashable, Tensor | None, Tensor | None]]] = defaultdict(dict)
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

    def _leave(self, crossing: Crossing, about: Hashable, tensor: Tensor | None, text: Tensor | None = None) -> None:
        # All skips of a micro-batch for one rank are one message. They are fetched in another order than they are left.
        other = self._other(crossing)
        left, between = self._left[other], self._between[other]
        left[crossing] = about, tensor, text
        if len(left) == len(between):
            abouts, skips, texts = zip(*(left[each] for each in between), strict=True)
            sender = self._skips(Sender, other)
            sender.settle(abs(other - self._connections.own))
            self._connections.give(sender, abouts, (*skips, *texts))
            left.clear()

    def _fetch(self, crossing: Crossing) -> tuple[Any, Flat]:
        if crossing not in self._arrived:
            other = self._other(crossing)
            abouts, skips = self._connections.take(self._skips(Receiver, other))
            n = len(abouts)
            found = zip(abouts, zip(skips[:n], skips[n:], strict=True), strict=True)
            self._arrived.update(zip(self._between[other], found, strict=True))
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
        tensors = (*item.flat, _as_text(item, self._connections.own), *state)
        self._connections.give(self._after, (*_about(item), self._seeds.drew), tensors)

    def take(self) -> Item:
        (*about, drew), tensors = self._connections.take(self._before)
        self._seeds.drew = self._seeds.drew or drew
        if self._in_order:
            state, tensors = tensors[-1], tensors[:-1]
            assert state is not None
            torch.set_rng_state(state.cpu())
        return _item(about, tensors)

    def leave(self, i: int, crossing: Crossing, skip: Item) -> None:
        self._leave(crossing, _about(skip), skip.flat[0], _as_text(skip, self._connections.own))

    def fetch(self, i: int, crossing: Crossing) -> Item:
        return _item(*self._fetch(crossing))


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
        return self._fetch(crossing)[1][0]


def _about(item: Item) -> tuple[Hashable, ...]:
    name = f"{item.form.__module__}:{item.form.__qualname__}"
    _form_of(name)  # it raises here rather than there
    return name, item.shared, tuple([x is not None and x.requires_grad for x in item.flat])


def _as_text(item: Item, partition: int) -> Tensor | None:
    """Return the attributes of an item's tensors as text, of which no code is run; `None` if there are none."""
    attributes = [{} if x is None else vars(x) for x in item.flat]
    if not any(attributes):
        return None
    text = repr(attributes)
    with suppress(ValueError, SyntaxError):
        if literal_eval(text) == attributes:
            return torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8)
    raise TypeError(
        f"outputs of partition {partition} have attributes ({', '.join({}.fromkeys(chain(*attributes)))}), but with a "
        "tensor only finite numbers, strings, and tuples, lists and dictionaries of them travel between ranks; return "
        "a tensor as an output of its own"
    )


def _item(about: Sequence[Any], tensors: Flat) -> Item:
    name, shared, needs = about
    *flat, text = tensors
    for x, named in zip(flat, literal_eval(bytes(text.tolist()).decode()), strict=True) if text is not None else ():
        if x is not None:
            vars(x).update(named)
    return Item(leaves(tuple(flat), needs), _form_of(name), shared)


def _form_of(name: str) -> Form:
    """Return the class of this name, `Tensor` or one of tuples, that a module which is imported here has."""
    module, _, path = name.partition(":")
    found = reduce(lambda owner, part: getattr(owner, part, None), path.split("."), sys.modules.get(module))
    if not (isinstance(found, type) and issubclass(found, Tensor | tuple)):
        raise TypeError(f"a layer returned a {name}, which ranks do not find; define the class at the top of a module")
    return found
