"""Run a function in several new processes, each of which has a connection to this process."""

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from typing import Any, NamedTuple


class Ended(NamedTuple):
    """How a process has ended: a text such as `by SIGKILL` or `with exit code 1`."""

    how: str


class Launched:
    """Several new processes that run the same function. `close()` kills all of them.

    Attributes:
        links: For each new process, a connection to it: the end that this process uses.

    Args:
        method: The start method of `multiprocessing`: "spawn" starts a new Python, "fork" forks
            this process, and "forkserver" forks a server process.
        count: The number of processes.
        run: Each process calls `run(k, link, *arguments)` and then ends. `k` is the number of the
            process, and `link` is its connection to this process.
        arguments: Further arguments of `run`.
        daemon: Whether the processes end when this process exits.
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
        """Send an object to all processes, or only to the processes with the numbers `some`.

        Processes that have ended are skipped.
        """
        if some is None:
            some = range(len(self.links))
        for k in some:
            with suppress(ConnectionError):
                self.links[k].send(what)

    def receive(self, of: Iterable[int], seconds: float | None = None) -> Iterator[tuple[int, Any]]:
        """Wait for the processes whose numbers are in `of`, and yield what they have sent.

        The wait ends when one of them has sent an object, or has ended. For each process that has
        sent an object, yield the number of the process and the object. For a process that has
        ended, yield its number and an `Ended`. If nothing arrives within `seconds`, yield nothing.
        """
        links = [self.links[k] for k in of]
        for link in connection.wait(links, seconds):
            k = self.links.index(link)  # type: ignore[arg-type]
            try:
                yield k, self.links[k].recv()
            except (EOFError, ConnectionError):
                yield k, self._end(k)

    def close(self) -> None:
        """Kill all processes."""
        for process, link in zip(self.processes, self.links, strict=True):
            with suppress(ProcessLookupError):  # it has ended already
                process.kill()
            process.join()
            link.close()
        self.processes = []
        self.links = []

    def _end(self, k: int) -> Ended:
        process = self.processes[k]
        process.join()
        code = process.exitcode
        if code >= 0:
            return Ended(f"with exit code {code}")
        name = signal.Signals(-code).name
        return Ended(f"by {name}")


def _run(inherited: list[Connection], run: Callable[..., None], *arguments: Any) -> None:
    # A forked process inherits the parent's ends of the connections. It has to close these ends.
    # Otherwise the connections would stay open when the parent exits, and no forked process would
    # notice the exit.
    for link in inherited:
        link.close()
    run(*arguments)
