"""Fork processes that are the ranks of a gloo process group, and call functions in them."""

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from reproduce.error import Error
from reproduce.run.engines.launch import Ended, Launched


class Ranks:
    """Forked processes that are the ranks of a gloo process group. `run` calls a function in them.

    Create this object before the program starts other threads, because a fork with threads is
    unsafe.

    Args:
        n: The number of ranks.
    """

    def __init__(self, n: int) -> None:
        self._n = n
        self._launched = Launched("fork", n, _serve, n)
        tcp: Any = dist.TCPStore  # type: ignore[attr-defined]
        self._store = tcp("127.0.0.1", 0, None, True, wait_for_workers=False)
        self._launched.send(self._store.port)
        self.close = self._launched.close
        self._runs = 0

    def run(self, do: Callable[..., Any], *given: Any) -> list[Any]:
        """Call `do(store, *given)` on every rank, and return the result of each rank.

        Args:
            do: The function. It is pickled, so it must be defined at the top level of a module. Its
                argument `store` is a store that all ranks share, and that is new for each call.
            given: Further arguments of the function.

        Raises:
            Error: A rank raised an exception, or its process ended.
        """
        self._runs += 1
        self._launched.send((str(self._runs), do, given))
        answers: dict[int, Any] = {}
        while len(answers) < self._n:
            for k, answer in self._launched.receive(set(range(self._n)) - answers.keys()):
                if isinstance(answer, Ended):
                    raise Error(f"rank {k} ended {answer.how}")
                if isinstance(answer, _Failed):
                    raise Error(answer)
                answers[k] = answer
        return [answers[k] for k in range(self._n)]


class _Failed(str):
    """The answer of a rank whose function raised an exception: the error's type and first line."""


def _serve(k: int, link: Connection, n: int) -> None:
    torch.set_num_threads(1)
    store: Any = dist.TCPStore("127.0.0.1", link.recv(), None, False)  # type: ignore[attr-defined]

    ranks = dist.PrefixStore("ranks", store)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=ranks, rank=k, world_size=n)
    while True:
        try:
            run, do, given = link.recv()
        except EOFError:  # the process that has started this one has ended
            return
        shared = dist.PrefixStore(run, store)  # type: ignore[attr-defined]
        try:
            answer = do(shared, *given)
        except Exception as error:
            said, *_ = str(error).splitlines() or [""]
            answer = _Failed(f"{type(error).__name__}: {said}")
        link.send(answer)
