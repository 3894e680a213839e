"""Train on two machines that are network namespaces of this one, and compare the losses with those of one process.

    python -m benchmarks.two_machines                          # two models, two ranks on each machine
    python -m benchmarks.two_machines --delay 5 --loss 0.01    # each packet takes 5 ms longer, 1 % are lost

Each machine has a network of its own and runs one node of torchrun. All that joins them is a link, whose packets pass
through this process: so it can delay and lose them, on every Linux. Namespaces are made within a user namespace of this
process's own. They end with it, whatever happens, and it takes no root.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import os
import random
import re
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn

from benchmarks.harness import command, positive, render
from reproduce.error import Error

ROOT = Path(__file__).resolve().parent.parent
MODELS = ("transformer", "amoebanetd")
NAMES = "abcd"  # of networks
LIMIT = 600  # seconds, for one training

_CLONE_NEWNET, _TUNSETIFF, _IFF_TUN_NO_PI = 0x40000000, 0x400454CA, 0x1001
_STEP = re.compile(r"step \d+: loss (\S+), gradient norm (\S+), (\S+) s")


def problem() -> str | None:
    """Return why there can be no namespaces here, or `None`."""
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    try:
        tried = subprocess.run([*apart(), "ip", "netns", "add", "try"], capture_output=True, text=True, check=False)
    except FileNotFoundError as missing:
        return f"{missing.filename} is not installed (util-linux, iproute2)"
    return (tried.stderr.strip() or "namespaces are not allowed") if tried.returncode else None


def apart() -> list[str]:
    """Return what a command has to begin with, to run as root among networks and shared memory of its own."""
    # A file system for the names of the networks, which nobody else sees.
    mount = 'mkdir -p /run/netns && mount -t tmpfs tmpfs /run/netns && mount -t tmpfs tmpfs /dev/shm && exec "$@"'
    return ["unshare", "--user", "--map-root-user", "--net", "--mount", "sh", "-c", mount, "sh"]


def again_apart(program: str, arguments: Sequence[str] | None) -> NoReturn:
    """Run a program of benchmarks in place of this one, `apart` and with `--inside`; `None` stands for `sys.argv`."""
    given = sys.argv[1:] if arguments is None else arguments
    os.execvp(apart()[0], [*apart(), sys.executable, "-m", f"benchmarks.{program}", "--inside", *given])


def move_to(network: str) -> None:
    """Move this thread into a network."""
    file = os.open(f"/run/netns/{network}", os.O_RDONLY)
    moved = ctypes.CDLL(None, use_errno=True).setns(file, _CLONE_NEWNET)
    os.close(file)
    if moved:
        raise OSError(ctypes.get_errno(), "setns")


class Link:
    """What joins a network to the others, each of one device; threads carry packets with `delay` seconds and `loss`.

    Attributes:
        cut: the networks, by number, that nothing is carried to or from.
    """

    def __init__(self, delay: float = 0.0, loss: float = 0.0, networks: int = 2) -> None:
        self.cut: set[int] = set()
        self._delay, self._loss = delay, loss
        self._devices = [_network(NAMES[k], address(k)) for k in range(networks)]
        waiting: list[SimpleQueue[tuple[float, bytes]]] = [SimpleQueue() for _ in self._devices]
        for k in range(networks):
            _thread(self._take_in, k, waiting)
            _thread(self._hand_out, k, waiting[k])

    def _take_in(self, k: int, waiting: Sequence[SimpleQueue[tuple[float, bytes]]]) -> None:
        lost = random.Random(k)
        while True:
            packet = os.read(self._devices[k], 1 << 16)
            to = packet[19] - 1  # of an address that ends in 1, 2, ...
            if packet[0] >> 4 == 4 and to < len(waiting) and not self.cut & {k, to} and lost.random() >= self._loss:
                waiting[to].put((time.monotonic(), packet))

    def _hand_out(self, k: int, waiting: SimpleQueue[tuple[float, bytes]]) -> None:
        while True:
            came, packet = waiting.get()
            time.sleep(max(0.0, came + self._delay - time.monotonic()))
            with suppress(OSError):  # the device is full or down: a packet more that is lost
                os.write(self._devices[k], packet)


def _thread(run: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=run, args=arguments, daemon=True).start()


def address(k: int) -> str:
    """Return the address of the machine in network k."""
    return f"10.77.0.{k + 1}"


def _network(name: str, own: str) -> int:
    """Make a network with one device, whose packets are read from and written to the file that is returned."""
    subprocess.run(["ip", "netns", "add", name], check=True)
    made: SimpleQueue[int | OSError] = SimpleQueue()

    def make() -> None:  # in a thread of its own, which stays in that network until it ends
        try:
            move_to(name)
            device = os.open("/dev/net/tun", os.O_RDWR)
            fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"link", _IFF_TUN_NO_PI))
            made.put(device)
        except OSError as error:
            made.put(error)

    threading.Thread(target=make).start()
    device = made.get()
    if isinstance(device, OSError):
        raise Error(f"no network device: {device}")
    for setting in (f"addr add {own}/24 dev link", "link set dev link up", "link set dev lo up"):
        subprocess.run(["ip", "-n", name, *setting.split()], check=True)
    return device


def trained(*start: str, options: argparse.Namespace, model: str) -> list[tuple[str, str, float]]:
    """Return each step's loss, norm of gradients, and seconds, of a training that ends by itself."""
    return _steps(_started(*start, options=options, model=model))


def on_two_machines(options: argparse.Namespace, model: str) -> list[tuple[str, str, float]]:
    """Train with one node of torchrun in each network, as `trained` does in one process."""
    nodes = [
        _started(
            *("ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", "2", "--node-rank", str(k), "--nproc-per-node", str(options.ranks)),
            *("--master-addr", address(0), "--master-port", "29400", "--local-addr", address(k)),
            options=options,
            model=model,
        )
        for k, name in enumerate(NAMES[:2])
    ]
    try:
        first, _ = [_steps(node, allow_none=k > 0) for k, node in enumerate(nodes)]
    finally:
        for node in nodes:
            node.kill()
    return first


def _started(*start: str, options: argparse.Namespace, model: str) -> subprocess.Popen[str]:
    script = ["examples/train.py", model, "--partitions", str(2 * options.ranks), "--steps", str(options.steps)]
    return subprocess.Popen(
        [*start, *script, "--batch", "8"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "link", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _steps(process: subprocess.Popen[str], *, allow_none: bool = False) -> list[tuple[str, str, float]]:
    try:
        said, errors = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        raise Error(f"no end after {LIMIT} s: {' '.join(map(str, process.args))}") from None  # type: ignore[arg-type]
    found = [(loss, norm, float(seconds)) for loss, norm, seconds in _STEP.findall(said)]
    if process.returncode or not (found or allow_none):
        raise Error(f"the training ended with exit code {process.returncode}:\n{errors[-2000:]}")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Train each model both ways, and print a table; exit with 1 where losses differ."""
    parser = command("two_machines", __doc__, json=False)
    parser.add_argument("models", nargs="*", help=f"default: {' '.join(MODELS)}")
    parser.add_argument("--ranks", type=positive, default=2, help="on each machine (default 2)")
    parser.add_argument("--steps", type=positive, default=4)
    parser.add_argument("--delay", type=float, default=0.0, metavar="MS", help="of each packet, one way")
    parser.add_argument("--loss", type=float, default=0.0, metavar="SHARE", help="of packets, from 0 to below 1")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not 0 <= options.loss < 1 or options.delay < 0:
        parser.error("--loss is a share from 0 to below 1, and --delay is 0 or more milliseconds")
    if not options.inside:
        if (why := problem()) is not None:
            raise SystemExit(f"two machines need two network namespaces: {why}")
        again_apart("two_machines", arguments)
    Link(options.delay / 1000, options.loss)
    rows, equal = [], True
    for model in options.models or MODELS:
        alone = trained(sys.executable, options=options, model=model)
        on_two = on_two_machines(options, model)
        same = [step[:2] for step in alone] == [step[:2] for step in on_two]
        equal &= same
        for way, steps in (("one process", alone), (f"{options.ranks} + {options.ranks} ranks", on_two)):
            rows.append([model, way, f"{statistics.median(s for *_, s in steps):.3f}", steps[-1][0]])
        rows.append(["", "losses and norms", "", "equal to the bit" if same else "DIFFERENT"])
    print(f"delay {options.delay:g} ms, {options.loss:.1%} of packets lost, {options.steps} steps\n")
    print(render(["model", "way", "step s", "last loss"], rows, "simple"))
    if not equal:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
