"""Messages from rank to rank: a description, and the contents of tensors.

The description has the shapes and types of the tensors, and plain Python values. Most messages have
the same description as an earlier message. So a sender numbers its descriptions, and sends each
description only once. Later messages have only the description's number. A message consists of

    a slot (a buffer) of at most 1 MiB, with
        the serial number of the mini-batch
        the number of the description
        the length of the description, or 0 if the receiver knows the description
        the description, if it is new
        small tensors
    large parts, each sent separately: tensors and descriptions that do not fit into the slot
"""

import struct
from collections.abc import Hashable, Iterable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpipe.distributed.channels.layout import Layout
from torchgpipe.plain import packed, unpacked
from torchgpipe.tensors.microbatch import Flat

NEVER = timedelta(days=365)
"""The timeout of operations between ranks. It is long, because other ranks may compute for long."""

SLOT = 2**20
"""How many bytes a slot (the buffer at the beginning of a message) has."""

HEAD = struct.Struct("<qqq")
"""The first three numbers of a slot, which the module's docstring lists."""


class Message(NamedTuple):
    """A message from one rank to another rank.

    Attributes:
        serial: The number of the mini-batch. The receiver compares it with its own number.
        about: Plain values that are sent with the tensors.
        tensors: The tensors. An element can be `None`.
    """

    serial: int
    about: Any
    tensors: Flat


Description = tuple[Hashable, tuple[Layout | None, ...]]
"""The plain values of a message, and the layouts of its tensors."""


def described(about: Hashable, layouts: Iterable[Layout | None]) -> Tensor:
    """Encode a description, which consists of plain values and layouts of tensors, as bytes.

    Raises:
        TypeError: If `about` contains anything else than plain Python values.
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
    """Return where each part of a message goes: its size, and its offset in the slot, in bytes.

    A message begins with a buffer of limited size, the slot. A part that does not fit into the slot
    is sent separately, after the slot, and its offset is `None`.
    """
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
    """Return the size, in bytes, of each tensor that gloo transfers; leave out other tensors."""
    _, layouts = description
    return [layout.bytes for layout in layouts if layout is not None and layout.bytes]


class Predicted:
    """The descriptions of a channel's messages, and a prediction of the next description.

    Message k of a mini-batch is predicted to have the same description as message k of the previous
    mini-batch. The sender and the receiver each have a `Predicted` object. They call `begin` and
    `note` in the same order, so their predictions are equal without communication.

    Attributes:
        known: All descriptions so far; the index of a description is its number.
        number: The number of the predicted description. It is `None` without a prediction: if the
            previous mini-batch had no message in this place.
    """

    def __init__(self) -> None:
        self.known: list[Description] = []
        self.number: int | None = None
        # The descriptions' numbers of all messages in the previous and in the current mini-batch.
        self._before: list[int] = []
        self._now: list[int] = []

    def begin(self) -> None:
        """Begin a mini-batch, and predict the description of its first message.

        The predicted description is that of the previous mini-batch's first message. If a
        description is predicted already, it stays, because the receiver is already waiting for a
        message with this description.
        """
        self._before, self._now = self._now, []
        if self.number is None:
            self._predict()

    def note(self, number: int) -> None:
        """Record the description of this message, and predict the description of the next message.

        If this is message k of its mini-batch, the next message is predicted to have the same
        description as message k + 1 of the previous mini-batch.

        Args:
            number: The index of this message's description in `known`.
        """
        self._now.append(number)
        self._predict()

    def learn(self, description: Tensor, rank: int) -> None:
        """Decode a description that a rank has sent, and add it to `known`.

        Raises:
            RuntimeError: If the description cannot be decoded.
        """
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
                f"rank {rank} runs another program, or another version of this program, as its "
                "message cannot be decoded; start the same program on all ranks"
            ) from None

    def large(self) -> list[int]:
        """Predict the sizes, in bytes, of the tensors in the next message's large parts."""
        if self.number is None:
            return []
        expected = sizes(self.known[self.number])
        return [size for size, start in places(expected) if start is None]

    def _predict(self) -> None:
        k = len(self._now)
        self.number = self._before[k] if k < len(self._before) else None
