"""What ranks tell each other beside mini-batches: `Meeting`. A single process is the only rank."""

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from torchgpipe.plain import packed, unpacked

ONE_FOLDER = "all ranks need one folder, on a filesystem that all machines share"


class Meeting:
    """What ranks tell each other: `n` of them, of which this one is `own`."""

    def __init__(self, own: int, exchange: Callable[[Tensor], list[Tensor]]) -> None:
        self.own, self._exchange = own, exchange
        self._told = 0
        self.n = len(self.all(None))

    def all(self, own: Any) -> list[Any]:
        """Return the plain value that each rank gives."""
        return [*map(unpacked, self._exchange(packed(own)))]

    def through(self, folder: Path, own: Any) -> list[Any]:
        """Return what each rank gives, of any type, through files `told-*`: nothing from the network is unpickled."""
        if self.n == 1:
            return [own]
        self._told += 1
        files = [folder / f"told-{self._told}-{rank}" for rank in range(self.n)]
        files[self.own].write_bytes(pickle.dumps(own))
        self.all(None)  # all have told
        return [pickle.loads(file.read_bytes()) for file in files]

    def first(self, folder: Path, name: Callable[[], str | None]) -> Path | None:
        """Return what rank 0 names in a folder; raise `RuntimeError` if this rank does not see that."""
        named = self.all(name() if self.own == 0 else None)[0]
        path = None if named is None else folder / named
        if path is not None and not (
            re.fullmatch(r"[\w-]+", named) and path.is_dir()
        ):  # and not somewhere else
            gone = "which was there just now: has another program removed it?"
            other = f"but rank 0 does: {ONE_FOLDER}"
            raise RuntimeError(
                f"rank {self.own} does not see {path}, {other if self.own else gone}"
            )
        return path
