"""Processes that run functions as the ranks of a process group."""

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from reproduce.error import Error
from reproduce.run.engines.launch import Ended, Launched


class Ranks:
    """Processes that run functions as the ranks of a process group.

    The processes are forked, so create this object before the program starts other threads.

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
        """Call `do(store, *given)` on every rank, and return the results of all ranks.

        Args:
            do: A function at the top of a module. `store` is new for each call, and all ranks share
                it.
            given: Further arguments.

        Raises:
            Error: A rank raised an exception, or ended.
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
    """The first line of the exception that a rank raised."""


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
