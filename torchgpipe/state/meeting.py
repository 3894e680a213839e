"""What ranks tell each other beside mini-batches: `meeting`. A single process is the only rank."""

import json
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchgpipe.partitioned import Partitioned


class Meeting:
    """What ranks tell each other: `n` of them, of which this one is `own`."""

    def __init__(self, own: int, exchange: Callable[[Tensor], list[Tensor]]) -> None:
        self.own, self._exchange = own, exchange
        self._told = 0
        self.n = len(self.all(None))

    def all(self, own: Any) -> list[Any]:
        """Return what each rank gives: text, numbers, `None`, and lists and dictionaries of such."""
        data = json.dumps(own).encode()
        # Few lengths, since ranks remember the shapes that they have sent.
        padded = bytearray(data.ljust(1 << len(data).bit_length()))
        return [json.loads(bytes(each.numpy())) for each in self._exchange(torch.frombuffer(padded, dtype=torch.uint8))]

    def through(self, folder: Path, own: Any) -> list[Any]:
        """Return what each rank gives, of any type, through files: nothing that comes by the network is unpickled."""
        if self.n == 1:
            return [own]
        self._told += 1
        files = [folder / f"told-{self._told}-{rank}" for rank in range(self.n)]
        files[self.own].write_bytes(pickle.dumps(own))
        self.all(None)  # all have told
        told = [pickle.loads(file.read_bytes()) for file in files]
        self.all(None)  # and read
        files[self.own].unlink()
        return told

    def first(self, folder: Path, name: Callable[[], str | None]) -> Path | None:
        """Return what rank 0 names in a folder; raise `RuntimeError` if this rank does not see that."""
        named = self.all(name() if self.own == 0 else None)[0]
        path = None if named is None else folder / named
        if path is not None and not (re.fullmatch(r"[\w-]+", named) and path.is_dir()):  # and not somewhere else
            shared = "but rank 0 does: all ranks need one folder, on a filesystem that all machines share"
            gone = "which was there just now: has another program removed it?"
            raise RuntimeError(f"rank {self.own} does not see {path}, {shared if self.own else gone}")
        return path


@contextmanager
def meeting(model: Partitioned, doing: str) -> Iterator[Meeting]:
    """Let all ranks meet for what `doing` says; if one of them fails meanwhile, all raise."""
    with model._together(doing) as exchange:
        yield Meeting(getattr(model, "rank", 0), exchange)
