"""Exchange values between ranks while they save or load a state: `Meeting`.

A pipeline in a single process counts as one rank, which only gets its own values back.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchgpipe.plain import packed, unpacked

ONE_FOLDER = "all ranks need one folder, on a filesystem that all machines share"

_FOLDER_NAME = re.compile(r"[\w-]+")
"""Matches the name of a subfolder, but no path that leads to another folder."""


class Meeting:
    """An object by which the ranks of a pipeline send values to each other.

    All ranks have to call the same methods in the same order. A call returns when all ranks have
    made this call.

    Attributes:
        own: The index of this rank.
        n: The number of ranks.
    """

    def __init__(self, own: int, exchange: Callable[[Tensor], list[Tensor]]) -> None:
        self.own = own
        self._exchange = exchange
        self._told = 0
        self.n = len(self.all(None))

    def all(self, own: Any) -> list[Any]:
        """Send a value to all ranks; return a list of the values of all ranks, in their order.

        The value `own` has to be made of plain Python values, such as numbers, strings and lists.
        """
        given = self._exchange(packed(own))
        return list(map(unpacked, given))

    def through(self, folder: Path, own: Any) -> list[Any]:
        """Send a value of any type to all ranks through files; return the values of all ranks.

        Each rank pickles its value into a file `told-*` in `folder`, and the others read this file.
        The value is not sent over the network, because unpickling data from a network is not safe.
        """
        if self.n == 1:
            return [own]
        self._told += 1
        files = [folder / f"told-{self._told}-{rank}" for rank in range(self.n)]
        torch.save(own, files[self.own])
        self.all(None)  # now every rank has written its file
        # On the CPU, because a tensor of another rank can be on a GPU that this rank does not use.
        return [torch.load(file, weights_only=False, map_location="cpu") for file in files]

    def first(self, folder: Path, name: Callable[[], str | None]) -> Path | None:
        """Let rank 0 choose a subfolder for all ranks, and return the subfolder's path.

        Args:
            folder: The folder that contains the subfolder.
            name: A function that returns the name of the chosen subfolder, or `None` to choose
                none. It is called on rank 0 only.

        Returns:
            The path, or `None` if rank 0 chooses none.

        Raises:
            RuntimeError: If this rank does not see the subfolder in its filesystem.
        """
        own = name() if self.own == 0 else None
        named = self.all(own)[0]
        if named is None:
            return None
        path: Path = folder / named
        if _FOLDER_NAME.fullmatch(named) and path.is_dir():
            return path
        if self.own == 0:
            why = "which was there just now: has another program removed it?"
        else:
            why = f"but rank 0 does: {ONE_FOLDER}"
        raise RuntimeError(f"rank {self.own} does not see {path}, {why}")
