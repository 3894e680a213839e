"""What travels by a wire: a message has a description, and the contents of its tensors.

The description says everything else about the tensors: their shapes and types, and whatever the
sender adds. A description is sent once, and has a number from then on. So a message consists of

    a slot of at most 1 MiB, with
        the serial number of the mini-batch
        the number of the description
        the length of the description, or 0 if it is known
        the description, if it is new
        small tensors
    large parts, one by one: what does not fit into the slot
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
"""How many bytes a slot has."""

HEAD = struct.Struct("<qqq")
"""The beginning of a slot: three numbers, which the module lists."""


class Message(NamedTuple):
    """A message of a wire.

    Attributes:
        serial: The number of the mini-batch, by which ranks notice that they are in different ones.
        about: What is said about the tensors, in plain values.
        tensors: The tensors, or `None` in the place of one.
    """

    serial: int
    about: Any
    tensors: Flat


Description = tuple[Hashable, tuple[Layout | None, ...]]
"""What is said about the tensors of a message, and their layouts."""


def described(about: Hashable, layouts: Iterable[Layout | None]) -> Tensor:
    """Return a description as bytes.

    Raises:
        TypeError: If `about` is not made of plain values.
    """
    told: list[tuple[Any, ...] | None] = []
    for layout in layouts:
        if layout is None:
            told.append(None)
        else:
            dtype, *others = layout
            told.append((str(dtype).removeprefix("torch."), *others))
    return packed((about, told))


def places(sizes: Iterable[int]) -> list[tuple[int, int | None]]:
    """Return the size of each part, and where it begins in the slot; `None` if it does not fit."""
    found: list[tuple[int, int | None]] = []
    at = HEAD.size
    for size in sizes:
        if at + size <= SLOT:
            found.append((size, at))
            at += size
        else:
            found.append((size, None))
    return found


def sizes(description: Description) -> list[int]:
    """Return how many bytes each tensor of a message has, without tensors that have none."""
    _, layouts = description
    return [layout.bytes for layout in layouts if layout is not None and layout.bytes]


class Predicted:
    """The descriptions of a wire, and a prediction of the next message's description.

    Message k of a mini-batch is predicted to have the description of message k in the mini-batch
    before. Each end of the wire has a `Predicted` of its own. Both ends call `begin` and `note` in
    the same order, so both predict the same without telling each other.

    Attributes:
        known: All descriptions so far; the index of a description is its number.
        number: The number of the predicted description, or `None` if the mini-batch before had no
            message k.
    """

    def __init__(self) -> None:
        self.known: list[Description] = []
        self.number: int | None = None
        # The numbers of all messages in the mini-batch before, and in this one.
        self._before: list[int] = []
        self._now: list[int] = []

    def begin(self) -> None:
        """Begin a mini-batch.

        A prediction that was made before stays, since the receiver has prepared for it.
        """
        self._before, self._now = self._now, []
        if self.number is None:
            self._predict()

    def note(self, number: int) -> None:
        """Note the description of a message, and predict that of the next message."""
        self._now.append(number)
        self._predict()

    def learn(self, description: Tensor, rank: int) -> None:
        """Add the description that has come from a rank."""
        try:
            about, told = unpacked(description)
            layouts: list[Layout | None] = []
            for each in told:
                if not each:
                    layouts.append(None)
                else:
                    dtype, *others = each
                    layouts.append(Layout(getattr(torch, dtype), *others))
            self.known.append((about, tuple(layouts)))
        except Exception:
            raise RuntimeError(
                f"rank {rank} is another program, or another version of this one"
            ) from None

    def large(self) -> list[int]:
        """Return the sizes of the tensors that do not fit into the slot, as predicted."""
        if self.number is None:
            return []
        expected = sizes(self.known[self.number])
        return [size for size, start in places(expected) if start is None]

    def _predict(self) -> None:
        k = len(self._now)
        self.number = self._before[k] if k < len(self._before) else None
