"""What travels by a wire: a message is a description and the tensors' contents.

The description says everything else: shapes, types, and whatever the sender adds. It is sent once, and has a number
from then on. So a message is

    a slot of at most 1 MiB:    serial | number of the description | its length, if it is new | it | small tensors
    large parts, one by one     what does not fit into the slot
"""

import struct
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpipe.distributed.wires.layout import Layout
from torchgpipe.plain import packed, unpacked
from torchgpipe.tensors.microbatch import Flat

SLOT = 2**20
"""Bytes of a slot."""

HEAD = struct.Struct("<qqq")
"""What a slot begins with."""


class Message(NamedTuple):
    """Tensors, some of them `None`, and what is said of them. `serial` tells mini-batches apart."""

    serial: int
    about: Any
    tensors: Flat


Description = tuple[Hashable, tuple[Layout | None, ...]]


def described(about: Hashable, layouts: Iterable[Layout | None]) -> Tensor:
    """Return a description as bytes; raise `TypeError` if what it says of tensors is not made of plain values."""
    return packed(
        (
            about,
            [
                layout and (str(layout.dtype).removeprefix("torch."), *layout[1:])
                for layout in layouts
            ],
        )
    )


def places(sizes: Iterable[int]) -> list[tuple[int, int | None]]:
    """Return each part's size, and where in the slot it begins after the head; `None` where it is too large for it."""
    at, found = HEAD.size, list[tuple[int, int | None]]()
    for size in sizes:
        fits = at + size <= SLOT
        found.append((size, at if fits else None))
        at += size * fits
    return found


def sizes(description: Description) -> list[int]:
    """Return how many bytes each tensor of a message has that has any."""
    return [layout.bytes for layout in description[1] if layout is not None and layout.bytes]


class Predicted:
    """The descriptions of a wire, and which of them the next message is predicted to have.

    Message k of a mini-batch is predicted to have the description that message k had in the mini-batch before. Each end
    of the wire has a `Predicted` of its own. Both ends call `begin` and `note` in the same order, so both predict the
    same, and need not tell each other.

    Attributes:
        known: all descriptions so far; the number of one is its index.
        number: that of the prediction; `None` if the mini-batch before had no message k.
    """

    def __init__(self) -> None:
        self.known: list[Description] = []
        self.number: int | None = None
        self._before: list[int] = []  # numbers of the messages in the mini-batch before
        self._now: list[int] = []  # and in this one

    def begin(self) -> None:
        """Begin a mini-batch. A prediction that was made already stays: the receiver has prepared for it."""
        self._before, self._now = self._now, []
        if self.number is None:
            self._predict()

    def note(self, number: int) -> None:
        """Note which description a message has, and predict the next one's."""
        self._now.append(number)
        self._predict()

    def learn(self, description: Tensor, rank: int) -> None:
        """Add the description that has come from a rank."""
        try:
            about, layouts = unpacked(description)
            found = [
                layout and Layout(getattr(torch, layout[0]), *layout[1:]) for layout in layouts
            ]
            self.known.append((about, tuple(found)))
        except Exception:
            raise RuntimeError(
                f"rank {rank} is another program, or another version of this one"
            ) from None

    def large(self) -> list[int]:
        """Return the sizes of the tensors that do not fit into the slot, if the prediction is right."""
        expected = [] if self.number is None else sizes(self.known[self.number])
        return [size for size, start in places(expected) if start is None]

    def _predict(self) -> None:
        k = len(self._now)
        self.number = self._before[k] if k < len(self._before) else None
