"""Define faults that tests cause in a training, such as a process that is killed or that hangs.

The training program (program.py) calls one of these functions in its second step. Some of the
functions only take long. This is no fault: the training must go on after the function returns.
"""

import ctypes
import errno
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

SILENCE = 2.0
"""The timeout of the ranks in seconds, if a test waits for it."""
ROOM = 60.0
"""The timeout of the ranks in seconds, if no test waits for it.

On a busy machine, a process may not run for seconds. That must not count as a failure.
"""
PATIENCE = 40.0
"""How many seconds a test waits at most."""
FOR_EVER = 10 * PATIENCE


def raises() -> None:
    raise ValueError("on purpose")


def ends() -> None:
    raise SystemExit


def forks() -> None:
    """Fork a child process that runs for some seconds, as a data loader forks its workers."""
    here, there = os.pipe()
    if not os.fork():
        os.write(there, b"it runs")
        time.sleep(3 * SILENCE)
        os._exit(0)
    os.read(here, 1)


def forks_and_ends() -> None:
    forks()
    ends()


def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def is_told_to_end() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


USES = """import os, socket, sys, time
parent, seconds, *ports = sys.argv[1:]
print("it runs", flush=True)
while os.getppid() == int(parent):
    time.sleep(0.001)
kept = [socket.create_server(("127.0.0.1", int(port))) for port in ports]
time.sleep(float(seconds))
"""


def dies_and_its_ports_are_used() -> None:
    """Kill this process, and let another program listen on the ports that this process has used."""
    ports = [str(each.getsockname()[1]) for each in _listening()]
    command = [sys.executable, "-c", USES, str(os.getpid()), str(3 * SILENCE), *ports]
    other = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert other.stdout is not None
    assert other.stdout.readline()
    dies()


def dies_before_its_child() -> None:
    """Kill this process, but leave two child processes: a fork, and a program from a shell."""
    os.system(f"sleep {3 * SILENCE} >/dev/null 2>&1 &")
    forks()
    dies()


def stops() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hangs() -> None:
    time.sleep(FOR_EVER)


def strangers_write() -> None:
    """Write random bytes to each port of this process, as another program might by mistake."""
    for each in _listening():
        with socket.create_connection(each.getsockname()[:2]) as stranger:
            stranger.sendall(os.urandom(1000))


def overflows() -> None:
    """Stand for the fault that a gradient is infinite on one rank: all ranks must skip the update.

    This function does nothing. The table of faults (rows.py) needs a function for each fault, and
    the training program (program.py) makes the gradient infinite when the table names this
    function.
    """


def takes_another_pipeline() -> None:
    """Stand for the fault that one rank calls another pipeline than the other ranks.

    This function does nothing. The table of faults (rows.py) needs a function for each fault, and
    the training program (program.py) calls the wrong pipeline when the table names this function.
    """


def hangs_while_the_clock_is_set_back() -> None:
    """Hang, while the wall clock runs backwards."""
    time.time = lambda: -time.monotonic()
    hangs()


def sleeps(seconds: float) -> None:
    time.sleep(seconds)


def computes(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))


SAY_NOTHING = (
    dies,
    dies_before_its_child,
    dies_and_its_ports_are_used,
    is_told_to_end,
    hangs,
    hangs_while_the_clock_is_set_back,
)


def all_stop() -> None:
    """Wait for half a second, in which the test stops and continues all ranks' processes."""
    time.sleep(0.5)


def fills_the_disk() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fills_memory() -> None:
    """Allocate memory until it runs out: this process may take only 64 MiB more than it has now."""
    pages, *_ = Path("/proc/self/statm").read_text().split()
    limit = int(pages) * resource.getpagesize() + 2**26
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    filled = []
    while True:
        filled.append(torch.zeros(2**20))


def cuts_links(where: Path) -> None:
    """Cut all connections of this rank, and write their local port numbers to the file `where`.

    The other ranks read this file to cut their ends of the connections (see `cut_off`).
    """
    ports = []
    for each in [*_sockets()]:
        _cut(each)
        ports.append(str(each.getsockname()[1]))
    part = where.with_suffix(".part")
    part.write_text(" ".join(ports))
    part.rename(where)


def cut_off(where: Path) -> None:
    """Cut this rank's ends of the connections that another rank has cut by `cuts_links`.

    The other rank writes the port numbers of its ends to the file `where`. Wait for this file, and
    cut each connection that leads to one of these ports.
    """
    while not where.exists():
        time.sleep(0.01)
    ports = [int(port) for port in where.read_text().split()]
    for each in _sockets():
        with suppress(OSError):  # the socket has no peer
            if each.getpeername()[1] in ports:
                _cut(each)


def _sockets() -> Iterator[socket.socket]:
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the file is no socket
            found = socket.socket(fileno=os.dup(int(number)))
            if found.family in (socket.AF_INET, socket.AF_INET6):
                yield found


def _listening() -> list[socket.socket]:
    found = []
    for each in _sockets():
        listens = each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if listens:
            found.append(each)
    assert found
    return found


def _cut(link: socket.socket) -> None:
    """Make a socket drop all packets that arrive, as if the network cable had been cut.

    The socket drops even the packet that tells it that the other side has closed the connection.
    """
    nothing = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))
    program = struct.pack("HL", 1, ctypes.addressof(nothing))
    so_attach_filter = 26
    link.setsockopt(socket.SOL_SOCKET, so_attach_filter, program)


class Keyboard:
    """Simulate a user who presses Ctrl-C `times` times during a task of `lasts` seconds.

    A signal that arrives right before a thread begins to wait does not wake this thread. So signals
    are sent until `times` of them have been handled. Further signals have no effect.
    """

    def __init__(self, times: int = 1, lasts: float = 0.5) -> None:
        self.times, self.lasts = times, lasts
        self.over, self._latest = False, 0.0

    def listen(self) -> None:
        """Let this object handle the signal SIGINT (Ctrl-C). Call this in the main thread."""
        signal.signal(signal.SIGINT, self._hear)

    def __call__(self) -> None:
        threading.Thread(target=self._press, daemon=True).start()
        time.sleep(self.lasts)
        self.over = True

    def _press(self) -> None:
        while self.times:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)

    def _hear(self, *_: object) -> None:
        now = time.monotonic()
        # A second signal counts only after the first signal has had its effect.
        if self.times and now - self._latest > 0.2:
            self.times, self._latest = self.times - 1, now
            raise KeyboardInterrupt
