"""What ranks tell each other beside mini-batches: `meeting`. A single process is the only rank."""

import pickle
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
        self.n = len(self.all(None))

    def all(self, own: Any) -> list[Any]:
        """Return what each rank gives."""
        data = pickle.dumps(own)
        # Few lengths, since ranks remember the shapes that they have sent. What follows a pickle is not read.
        padded = bytearray(data.ljust(1 << len(data).bit_length(), b"\0"))
        given = self._exchange(torch.frombuffer(padded, dtype=torch.uint8))
        return [pickle.loads(each.numpy().tobytes()) for each in given]

    def first(self, make: Callable[[], Any]) -> Any:
        """Return what `make` returns on rank 0; it is called there only."""
        return self.all(make() if self.own == 0 else None)[0]

    def check_seen(self, path: Path) -> None:
        """Raise `RuntimeError` if this rank does not see a folder that rank 0 sees."""
        if not path.is_dir():
            raise RuntimeError(
                f"rank {self.own} does not see {path}, but rank 0 does: all ranks need one folder, on a filesystem "
                "that all machines share"
            )


@contextmanager
def meeting(model: Partitioned, doing: str) -> Iterator[Meeting]:
    """Let all ranks meet for what `doing` says; if one of them fails meanwhile, all raise."""
    with model._together(doing) as exchange:
        yield Meeting(getattr(model, "rank", 0), exchange)
