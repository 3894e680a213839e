"""Run a function in several processes, each with a connection to this one."""

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

    `method` is multiprocessing's start method: `spawn` starts a new Python, `forkserver` forks a server process that
    has imported some modules, and `fork` forks this process. `links` are the connections. `close()` ends all of them.
    """

    def __init__(
        self,
        method: str,
        count: int,
        run: Callable[..., None],
        *arguments: Any,
        daemon: bool = True,
    ) -> None:
        context: Any = get_context(method)
        self.links: list[Connection] = []
        self.processes: list[Any] = []
        for k in range(count):
            ours, theirs = context.Pipe()
            inherited = [*self.links, ours] if method == "fork" else []
            process = context.Process(
                target=_run, args=(inherited, run, k, theirs, *arguments), daemon=daemon
            )
            process.start()
            theirs.close()
            self.links.append(ours)
            self.processes.append(process)

    def send(self, what: Any, some: Iterable[int] | None = None) -> None:
        """Send an object to all or some of them. A process that has ended is skipped."""
        for k in range(len(self.links)) if some is None else some:
            with suppress(ConnectionError):
                self.links[k].send(what)

    def receive(self, of: Iterable[int], seconds: float | None = None) -> Iterator[tuple[int, Any]]:
        """Wait until some of them have sent something, at most for `seconds`; yield their numbers and what they sent.

        For a process that has ended, yield `Ended`.
        """
        for link in connection.wait([self.links[k] for k in of], seconds):
            k = self.links.index(link)  # type: ignore[arg-type]
            try:
                yield k, self.links[k].recv()
            except (EOFError, ConnectionError):
                yield k, self._end(k)

    def close(self) -> None:
        """Kill all of them."""
        for process, link in zip(self.processes, self.links, strict=True):
            with suppress(ProcessLookupError):  # it has ended already
                process.kill()
            process.join()
            link.close()
        self.processes, self.links = [], []

    def _end(self, k: int) -> Ended:
        self.processes[k].join()
        code = self.processes[k].exitcode
        return Ended(f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}")


def _run(inherited: list[Connection], run: Callable[..., None], *arguments: Any) -> None:
    # A forked process inherits the parent's ends of links. It closes them, so that all processes see the parent exit.
    for link in inherited:
        link.close()
    run(*arguments)
