"""Run a function in several processes, each with a link to this one."""

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from typing import Any, NamedTuple


class Ended(NamedTuple):
    """How a process has ended: `by SIGKILL`, or `with exit code 1`."""

    how: str


class Launched:
    """`count` processes, each of which calls `run(k, link, *arguments)` with its number and its link, and then ends.

    They are started by a `method` of multiprocessing: `spawn` starts Python anew, `forkserver` forks a process that has
    imported some modules already, and `fork` this one. They end by `close()` at the latest.

    Attributes:
        links: to each of them.
        processes: themselves.
    """

    def __init__(self, method: str, count: int, run: Callable[..., None], *arguments: Any, daemon: bool = True) -> None:
        context: Any = get_context(method)
        self.links: list[Connection] = []
        self.processes: list[Any] = []
        for k in range(count):
            ours, theirs = context.Pipe()
            inherited = [*self.links, ours] if method == "fork" else []
            process = context.Process(target=_run, args=(inherited, run, k, theirs, *arguments), daemon=daemon)
            process.start()
            theirs.close()
            self.links.append(ours)
            self.processes.append(process)

    def tell(self, what: Any, some: Iterable[int] | None = None) -> None:
        """Tell all or some of them something; one that has ended does not hear it."""
        for k in range(len(self.links)) if some is None else some:
            with suppress(ConnectionError):
                self.links[k].send(what)

    def hear(self, of: Iterable[int], seconds: float | None = None) -> Iterator[tuple[int, Any]]:
        """Wait until some say something, at most for so many seconds; yield their numbers and what they say.

        One that has ended says `Ended`.
        """
        for link in connection.wait([self.links[k] for k in of], seconds):
            k = self.links.index(link)  # type: ignore[arg-type]
            try:
                yield k, self.links[k].recv()
            except (EOFError, ConnectionError):
                yield k, self._end(k)

    def close(self) -> None:
        """End them all."""
        for process, link in zip(self.processes, self.links, strict=True):
            with suppress(ProcessLookupError):  # it has ended
                process.kill()
            process.join()
            link.close()
        self.processes, self.links = [], []

    def _end(self, k: int) -> Ended:
        self.processes[k].join()
        code = self.processes[k].exitcode
        return Ended(f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}")


def _run(inherited: list[Connection], run: Callable[..., None], *arguments: Any) -> None:
    # Or the processes that have the other ends would not notice that the one that started them has ended.
    for link in inherited:
        link.close()
    run(*arguments)
