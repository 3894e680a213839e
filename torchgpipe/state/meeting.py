"""Exchange values between ranks while they save or load a state: `Meeting`.

A pipeline in a single process counts as one rank, which exchanges values only with itself.
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
    """An exchange of values between the ranks of a pipeline.

    All ranks have to call the methods, in the same order.

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
        """Send the value `own` to all ranks; return the values of all ranks, in the order of ranks.

        The value has to consist of plain Python values, such as numbers, strings and lists.
        """
        given = self._exchange(packed(own))
        return list(map(unpacked, given))

    def through(self, folder: Path, own: Any) -> list[Any]:
        """Give a value of any type to all ranks through files; return the values of all ranks.

        Ranks pickle their values into files `told-*` in `folder`. Values do not go over the
        network, because this library unpickles nothing that comes from the network.
        """
        if self.n == 1:
            return [own]
        self._told += 1
        files = [folder / f"told-{self._told}-{rank}" for rank in range(self.n)]
        torch.save(own, files[self.own])
        self.all(None)  # now every rank has written its file
        return [torch.load(file, weights_only=False) for file in files]

    def first(self, folder: Path, name: Callable[[], str | None]) -> Path | None:
        """Return the path of the subfolder that rank 0 chooses, or `None` if rank 0 chooses none.

        Args:
            folder: The folder that contains the subfolder.
            name: A function that returns the subfolder's name, or `None`. It is called on rank 0
                only.

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
