"""`Messages` sends activations and gradients between ranks while they run their tasks."""

import sys
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from torchgpipe.distributed.channels.receiver import Receiver
from torchgpipe.distributed.channels.sender import Sender
from torchgpipe.distributed.channels.structure import described, structure_of
from torchgpipe.distributed.channels.transfer import Stages
from torchgpipe.distributed.connections import Connections, E
from torchgpipe.engine.program import Links
from torchgpipe.engine.relay import Stopped
from torchgpipe.engine.seeds import Seeds
from torchgpipe.plain import packed, unpacked
from torchgpipe.schedules import Action
from torchgpipe.schedules.check import Lists
from torchgpipe.skip.layout import Crossing
from torchgpipe.task.entrance import as_leaves
from torchgpipe.tensors.item import Item
from torchgpipe.tensors.microbatch import Flat, Form
from torchgpipe.trace.parts import Structure

_SENDING = {True: ("forward",), False: ("backward", "backward_inputs")}
"""The kinds of actions that send a result to another stage, in forward (`True`) or in backward."""

Told = tuple[Hashable, Flat]
"""A description of some tensors, in plain values, and the tensors."""


class RandomState(NamedTuple):
    """What ranks tell each other about random numbers, in the message with each micro-batch.

    Attributes:
        seeds: The seeds of the mini-batch. Ranks send only the value `seeds.drew`: whether any
            stage has drawn random numbers so far.
        in_order: Whether only one task at a time runs on all ranks together. In this case, ranks
            also send the state of PyTorch's default generator, so that all ranks together draw the
            same numbers as a single process would.
    """

    seeds: Seeds
    in_order: bool


class Messages(Links):
    """Send the results of tasks to other ranks, and receive the results of other ranks' tasks.

    Each object is used for one run: all forwards, all backwards, or a whole `step`. The base class
    `torchgpipe.engine.program.Links` describes the methods.

    Args:
        connections: The connections of this rank.
        crossings: The skips (skip connections) that go from one stage to another.
        placement: The rank of each stage.
        lists: The actions (forwards, backwards and so on) of each rank.
        random: The state of random numbers, which ranks send each other with each micro-batch.
    """

    def __init__(
        self,
        connections: Connections,
        crossings: Sequence[Crossing],
        placement: Sequence[int],
        lists: Lists,
        random: RandomState,
    ) -> None:
        self._connections = connections
        self._placement = placement
        self._lists = lists
        self._seeds, self._in_order = random
        # Maps a pair of stages to the skips between them.
        self._between: dict[Stages, list[Crossing]] = defaultdict(list)
        for crossing in crossings:
            self._between[crossing.source, crossing.target].append(crossing)
        # Maps a direction and a pair of stages to the micro-batches whose skips must still be sent
        # or received, in this order.
        self._order: dict[tuple[bool, Stages], deque[int]] = {}
        for forward in {action.kind == "forward" for action in lists[connections.own]}:
            for pair in pairwise(range(len(placement))):
                self._begin(forward, pair)
            for pair in self._between:
                self._begin(forward, pair, skips=True)
                self._order[forward, pair] = self._micro_batches(forward, pair)
        # Skips that have arrived and are not fetched yet.
        self._arrived: dict[tuple[bool, int, Crossing], Any] = {}
        # Skips that are made and not sent yet.
        self._unsent: dict[Crossing, Told] = {}

    def check(self) -> None:
        if self._connections.liveness.stopped:
            raise Stopped

    def give(self, action: Action, item: Any) -> None:
        s = action.stage
        if action.kind == "forward":
            sender = self._channel(Sender, True, (s, s + 1))
            sender.settle()
            about, tensors = self._packed(item, s)
            if self._in_order:
                tensors = (*tensors, torch.get_rng_state())
            message = self._connections.message((*about, self._seeds.drew), tensors)
        else:
            sender = self._channel(Sender, False, (s - 1, s))
            sender.settle()
            message = self._connections.message("gradients", item)
        sender.give(message)

    def take(self, action: Action) -> Any:
        s = action.stage
        if action.kind != "forward":
            receiver = self._channel(Receiver, False, (s, s + 1))
            _, grads = self._connections.take(receiver)
            return grads
        receiver = self._channel(Receiver, True, (s - 1, s))
        (*about, drew), tensors = self._connections.take(receiver)
        self._seeds.drew = self._seeds.drew or drew
        if self._in_order:
            *others, state = tensors
            assert state is not None
            torch.set_rng_state(state.cpu())
            return _item(about, others)
        return _item(about, tensors)

    def give_skip(self, action: Action, crossing: Crossing, skip: Any) -> None:
        forward = action.kind == "forward"
        pair = crossing.source, crossing.target
        if self._stays(pair):
            self._arrived[forward, action.micro_batch, crossing] = skip
            return
        if forward:
            self._unsent[crossing] = self._packed(skip, action.stage)
        else:
            self._unsent[crossing] = "gradient", (skip,)
        # Send all skips between two stages in one message, as soon as the last of them is made.
        # In separate messages, they could come in another order than the receiver needs them.
        between = self._between[pair]
        if not self._unsent.keys() >= {*between}:
            return
        abouts: list[Hashable] = []
        tensors: list[Tensor | None] = []
        for each in between:
            about, flat = self._unsent.pop(each)
            abouts.append(about)
            tensors += flat
        sender = self._channel(Sender, forward, pair, skips=True)
        message = self._connections.message(tuple(abouts), tuple(tensors))
        sender.give(message)
        order = self._order[forward, pair]
        order.popleft()
        if not order:
            sender.release()

    def take_skip(self, action: Action, crossing: Crossing) -> Any:
        forward = action.kind == "forward"
        pair = crossing.source, crossing.target
        wanted = forward, action.micro_batch, crossing
        while wanted not in self._arrived:
            receiver = self._channel(Receiver, forward, pair, skips=True)
            abouts, tensors = self._connections.take(receiver)
            # Messages come in the order in which the sending stage does its micro-batches.
            i = self._order[forward, pair].popleft()
            width = len(tensors) // len(abouts)
            for k, arrived in enumerate(self._between[pair]):
                skip: Any = tensors[k * width : (k + 1) * width]
                skip = _item(abouts[k], skip) if forward else skip[0]
                self._arrived[forward, i, arrived] = skip
        return self._arrived.pop(wanted)

    def _begin(self, forward: bool, pair: Stages, *, skips: bool = False) -> None:
        """Begin a mini-batch on a channel, if this rank has exactly one end of it.

        For the arguments, see `_channel`.
        """
        own = self._connections.own
        ranks = [self._placement[s] for s in pair]
        if own not in ranks or self._stays(pair):
            return
        source = pair[0] if forward else pair[1]
        sends = self._placement[source] == own
        end: Any = Sender if sends else Receiver
        self._channel(end, forward, pair, skips=skips).begin()

    def _micro_batches(self, forward: bool, pair: Stages) -> deque[int]:
        """Return the micro-batches in the order in which a stage of a pair sends to the other."""
        source = pair[0] if forward else pair[1]
        kinds = _SENDING[forward]
        order: deque[int] = deque()
        for kind, i, stage in self._lists[self._placement[source]]:
            if stage == source and kind in kinds:
                order.append(i)
        return order

    def _stays(self, pair: Stages) -> bool:
        """Return whether the two stages of a pair are on the same rank."""
        source, target = pair
        return self._placement[source] == self._placement[target]

    def _channel(self, end: type[E], forward: bool, pair: Stages, *, skips: bool = False) -> E:
        """Return this rank's end of the channel between two stages.

        Args:
            end: Which end this rank has: `Sender` or `Receiver`.
            forward: Whether the channel carries outputs or skips, and not their gradients.
            pair: The two stages, the lower first.
            skips: Whether this is the channel of skips that lead from one stage to the other.
        """
        low, high = pair
        other = high if (end is Sender) == forward else low
        kind = "forward" if forward else "backward"
        if skips:
            kind += " skips"
        return self._connections.channel(end, kind, self._placement[other], pair)

    def _packed(self, item: Item, s: int) -> tuple[tuple[Hashable, ...], Flat]:
        """Return what to send for an item (output or skip) of stage s: a description, and tensors.

        Layers can set Python attributes on tensors, such as `x.scale = 2`, and return plain values
        together with tensors. These attributes and values are encoded in one more tensor, the last
        one. It is `None` if there are no attributes and values.
        """
        form: Hashable
        values: list[Any] = []
        if isinstance(item.form, Structure):
            form = described(item.form.value, values)
        else:
            form = f"{item.form.__module__}:{item.form.__qualname__}"
            _form_of(form)  # raises an error here if other ranks cannot find the class
        attributes = [{} if x is None else vars(x) for x in item.flat]
        told = None
        if any(attributes) or values:
            try:
                told = packed((attributes, values))
            except TypeError as error:
                names = ", ".join(dict.fromkeys(chain(*attributes)))
                raise TypeError(
                    f"outputs of partition {s} have attributes ({names}) that cannot be sent to "
                    f"other ranks: {error}; return a tensor as a separate output, not as an "
                    "attribute"
                ) from None
        needs = tuple([x is not None and x.requires_grad for x in item.flat])
        return (form, item.shared, needs), (*item.flat, told)


def _item(about: Sequence[Any], tensors: Sequence[Tensor | None]) -> Item:
    """Rebuild an item (an output or a skip) from the description and tensors of `_packed`."""
    name, shared, needs = about
    *flat, told = tensors
    values: list[Any] = []
    if told is not None:
        every, values = unpacked(told)
        for x, attributes in zip(flat, every, strict=True):
            if x is not None:
                vars(x).update(attributes)
    form = _form_of(name) if isinstance(name, str) else structure_of(name, values)
    return Item(as_leaves(tuple(flat), needs), cast(Form, form), shared)


def _form_of(name: str) -> Form:
    """Return the class with a given name, such as "builtins:tuple", from an imported module.

    Raises:
        TypeError: If this process has no class with this name, or if the class is neither `Tensor`
            nor a tuple class.
    """
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, Tensor | tuple)):
        raise TypeError(
            f"a layer returned an object of class {name}, which other ranks cannot import; define "
            "the class at the top level of a module"
        )
    return found
