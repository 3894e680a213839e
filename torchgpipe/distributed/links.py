"""A program's links to those of other ranks, over wires."""

import sys
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from functools import reduce
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor

from torchgpipe.distributed.connections import Connections, E, Stages
from torchgpipe.distributed.wires.message import Message
from torchgpipe.distributed.wires.wire import Receiver, Sender
from torchgpipe.engine.program import Links
from torchgpipe.engine.relay import Stopped
from torchgpipe.engine.seeds import Seeds
from torchgpipe.plain import packed, unpacked
from torchgpipe.schedules import Action
from torchgpipe.schedules.check import Lists
from torchgpipe.skip.layout import Crossing
from torchgpipe.task.entrance import leaves
from torchgpipe.tensors.item import Item
from torchgpipe.tensors.microbatch import Flat, Form

_KINDS = {True: ("forward",), False: ("backward", "backward_inputs")}
"""Which actions hand something on, forward or not."""


class Messages(Links):
    """A program's links for one run, over wires; see `torchgpipe.engine.program.Links`.

    `placement` says which rank has each stage, and `lists` what each does. A wire has a name: its direction and the two
    stages. With a micro-batch goes whether any stage so far has drawn random numbers. With `in_order`, tasks run one
    after another, and the state of the default generator goes with it, too.
    """

    def __init__(
        self,
        connections: Connections,
        crossings: Sequence[Crossing],
        placement: Sequence[int],
        lists: Lists,
        seeds: Seeds,
        *,
        in_order: bool,
    ) -> None:
        self._connections, self._placement = connections, placement
        self._seeds, self._in_order = seeds, in_order
        own = connections.own
        self._between: dict[Stages, list[Crossing]] = defaultdict(list)
        for crossing in crossings:
            self._between[crossing[1:]].append(crossing)
        self._order: dict[
            tuple[bool, Stages], deque[int]
        ] = {}  # of the micro-batches whose skips are still to be sent
        for forward in {action.kind == "forward" for action in lists[own]}:
            for what, pairs in (("", pairwise(range(len(placement)))), (" skips", self._between)):
                for pair in pairs:
                    ranks = [placement[s] for s in pair]
                    if own in ranks and not self._stays(pair):
                        end: Any = Sender if (own == ranks[0]) == forward else Receiver
                        self._wire(end, forward, what, pair).begin()
                        kinds, s = _KINDS[forward], pair[not forward]
                        done = [
                            i
                            for kind, i, stage in lists[placement[s]]
                            if kind in kinds and stage == s
                        ]
                        self._order[forward, pair] = deque(done)
        self._kept: dict[tuple[bool, int, Crossing], Any] = {}  # not yet fetched
        self._left: dict[Crossing, tuple[Hashable, Flat]] = {}

    def check(self) -> None:
        if self._connections.liveness.stopped:
            raise Stopped

    def give(self, action: Action, item: Any) -> None:
        s, forward = action.stage, action.kind == "forward"
        pair = (s, s + 1) if forward else (s - 1, s)
        sender = self._wire(Sender, forward, "", pair)
        sender.settle()
        about, tensors = self._packed(item, s) if forward else ("gradients", item)
        if forward:
            state = (torch.get_rng_state(),) if self._in_order else ()
            about, tensors = (*about, self._seeds.drew), (*tensors, *state)
        sender.give(Message(self._connections.serial, about, tensors))

    def take(self, action: Action) -> Any:
        s, forward = action.stage, action.kind == "forward"
        pair = (s - 1, s) if forward else (s, s + 1)
        about, tensors = self._connections.take(self._wire(Receiver, forward, "", pair))
        if not forward:
            return tensors
        *about, drew = about
        self._seeds.drew = self._seeds.drew or drew
        if self._in_order:
            state, tensors = tensors[-1], tensors[:-1]
            assert state is not None
            torch.set_rng_state(state.cpu())
        return _item(about, tensors)

    def leave(self, action: Action, crossing: Crossing, skip: Any) -> None:
        # All skips from stage to stage are one message. They are fetched in another order than they are left.
        forward, pair = action.kind == "forward", crossing[1:]
        if self._stays(pair):
            self._kept[forward, action.micro_batch, crossing] = skip
            return
        self._left[crossing] = (
            self._packed(skip, action.stage) if forward else ("gradient", (skip,))
        )
        between, order = self._between[pair], self._order[forward, pair]
        if self._left.keys() >= {*between}:
            abouts, skips = zip(*(self._left.pop(each) for each in between), strict=True)
            sender = self._wire(Sender, forward, " skips", pair)
            sender.give(Message(self._connections.serial, abouts, tuple(chain(*skips))))
            order.popleft()
            if not order:
                sender.release()

    def fetch(self, action: Action, crossing: Crossing) -> Any:
        # They come in the order of the other stage's list.
        forward, pair = action.kind == "forward", crossing[1:]
        while (forward, action.micro_batch, crossing) not in self._kept:
            abouts, tensors = self._connections.take(self._wire(Receiver, forward, " skips", pair))
            i, each = self._order[forward, pair].popleft(), len(tensors) // len(abouts)
            for k, arrived in enumerate(self._between[pair]):
                skip = tensors[k * each :][:each]
                self._kept[forward, i, arrived] = _item(abouts[k], skip) if forward else skip[0]
        return self._kept.pop((forward, action.micro_batch, crossing))

    def _stays(self, pair: Stages) -> bool:
        return self._placement[pair[0]] == self._placement[pair[1]]

    def _wire(self, end: type[E], forward: bool, what: str, pair: Stages) -> E:
        peer = self._placement[pair[(end is Sender) == forward]]
        return self._connections.wire(
            end, f"{'forward' if forward else 'backward'}{what}", peer, pair
        )

    def _packed(self, item: Item, s: int) -> tuple[tuple[Hashable, ...], Flat]:
        """Return what is said of an item, and its tensors with their attributes, if there are any."""
        name = f"{item.form.__module__}:{item.form.__qualname__}"
        _form_of(name)  # it raises here rather than there
        attributes = [{} if x is None else vars(x) for x in item.flat]
        try:
            told = packed(attributes) if any(attributes) else None
        except TypeError as error:
            raise TypeError(
                f"outputs of partition {s} have attributes "
                f"({', '.join({}.fromkeys(chain(*attributes)))}), but {error}; return a tensor as an output of its own"
            ) from None
        needs = tuple([x is not None and x.requires_grad for x in item.flat])
        return (name, item.shared, needs), (*item.flat, told)


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
    found = reduce(
        lambda owner, part: getattr(owner, part, None), path.split("."), sys.modules.get(module)
    )
    if not (isinstance(found, type) and issubclass(found, Tensor | tuple)):
        raise TypeError(
            f"a layer returned a {name}, which ranks do not find; define the class at the top of a module"
        )
    return found
