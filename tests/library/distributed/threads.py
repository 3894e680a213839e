"""Simulate ranks by threads of this process, so that tests need no other processes and no GPUs.

The pipeline, its connections and its threads are real. Gloo is replaced by queues in memory, and
NCCL by operations that take time on simulated streams (benchmarks/simulated.py). Only tests on GPUs
can show how the real NCCL behaves.
"""

from __future__ import annotations

import threading
from collections import Counter, UserDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple
from unittest.mock import Mock

import torch.distributed as dist
from torch import Tensor

from torchgpipe.distributed import connections
from torchgpipe.distributed.channels import transfer
from torchgpipe.distributed.channels.channel import KINDS
from torchgpipe.distributed.channels.message import SLOT
from torchgpipe.engine import batch
from torchgpipe.engine.seeds import Seeds

from ..ledger import at_once

PATIENCE = 30.0
GPUS = ["one", "two", "three", "four"]


@dataclass(eq=False)
class Parcel:
    """A tensor to be sent or received."""

    tensor: Tensor
    taken: bool = False


class Work(NamedTuple):
    """A pending gloo operation."""

    group: Group
    peer: int
    parcel: Parcel

    def wait(self, timeout: timedelta | None = None) -> None:
        world, group = self.group.world, self.group
        patience = PATIENCE if timeout is None else timeout.total_seconds()

        def ended() -> bool:
            return self.parcel.taken or group.lost(self.peer)

        with world.changed:
            in_time = world.changed.wait_for(ended, patience)
            if not in_time:
                world.closed.add((group.name, group.own))  # as gloo does after a timeout
                world.changed.notify_all()
        if not self.parcel.taken:
            raise RuntimeError("Connection closed by peer")


@dataclass(eq=False)
class Group:
    """A simulated Gloo process group, as one rank sees it."""

    world: World
    name: str
    own: int

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        kind = KINDS[tag % len(KINDS)]
        self.world.sent[kind, self.own, peer] += 1
        self.world.bytes += tensors[0].numel()
        channel = (self.name, self.own, peer, tag)
        return self._posted(tensors[0].clone(), peer, channel, 0)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        channel = (self.name, peer, self.own, tag)
        return self._posted(tensors[0], peer, channel, 1)

    def lost(self, peer: int) -> bool:
        closed = self.world.closed
        return (self.name, self.own) in closed or (self.name, peer) in closed

    def _posted(self, tensor: Tensor, peer: int, channel: tuple[Any, ...], end: int) -> Work:
        """Add a send or a receive to its queue, and copy the tensors that can now be received.

        Each connection (`channel`) has a queue of sends and a queue of receives. The oldest send
        belongs to the oldest receive.
        """
        parcel = Parcel(tensor)
        with self.world.changed:
            if self.lost(peer):
                raise RuntimeError("Connection closed by peer")
            self.world.box(channel, end).append(parcel)
            sent = self.world.box(channel, 0)
            expected = self.world.box(channel, 1)
            while sent and expected:
                here = sent.popleft()
                there = expected.popleft()
                given, room = len(here.tensor), len(there.tensor)
                # If the sizes differed, gloo would abort the process or give wrong data.
                assert given in (0, room) or given <= room == SLOT
                there.tensor[:given] = here.tensor
                here.taken = True
                there.taken = True
            self.world.changed.notify_all()
        return Work(self, peer, parcel)


@dataclass(eq=False)
class Move(Parcel):
    """A tensor that the simulated NCCL transfers.

    Attributes:
        ready: The simulated time in seconds at which the sender's stream reaches the transfer.
        end: The simulated time in seconds at which the tensor has arrived.
    """

    pair: Pair | None = None
    ready: float = 0.0
    before: Move | None = None
    end: float = 0.0

    def wait(self) -> None:
        thread = threading.current_thread().name
        assert thread.startswith("gpipe-to-"), "a program waits for a stream"
        assert self.pair is not None
        world, pair = self.pair.world, self.pair
        with world.changed:
            assert world.changed.wait_for(lambda: self.taken or pair.aborted, PATIENCE)


@dataclass(eq=False)
class Pair:
    """A simulated NCCL group of two ranks, a sender and a receiver.

    Each of the two ranks has its own object. The first transfer of a group takes no time.
    """

    world: World
    name: str
    aborted: bool = False
    latest: Move | None = None

    def __post_init__(self) -> None:
        self.kind, source, target = self.name.split("/")[-1].rsplit(" ", 2)
        self.source = int(source)
        self.target = int(target)

    def send(self, tensors: list[Tensor], *_: int) -> Mock:
        self._check()
        world = self.world
        stream = world.streams.current[-1]
        if self.latest is not None:
            world.issued[self.source].append(("send", self.kind, self.source, self.target))
        move = Move(tensors[0].clone(), pair=self, ready=stream.clock, before=self.latest)
        self.latest = move
        stream.work = move
        with world.changed:
            world.box(self.name).append(move)
            world.changed.notify_all()
        return Mock()  # nothing to wait for: the stream's clock already includes the transfer

    def recv(self, tensors: list[Tensor], *_: int) -> Mock:
        self._check()
        world = self.world
        stream = world.streams.current[-1]
        box = world.box(self.name)

        def ready() -> bool:
            return bool(box) or self.latest is not None or self.aborted

        with world.changed:
            assert world.changed.wait_for(ready, PATIENCE)
            self._check()
            assert box, "a receive was issued before its sending"
            move = box.popleft()
            self.latest = move
        start = max(move.ready, stream.clock)
        seconds = 0.0
        if move.before is not None:
            start = max(start, move.before.end)
            link = (min(self.source, self.target), max(self.source, self.target))
            seconds = world.streams.seconds.get(link, 0.0)
        move.end = start + seconds
        stream.clock = move.end
        tensors[0].copy_(move.tensor)
        with world.changed:
            move.taken = True
            world.changed.notify_all()
        return Mock()

    def abort(self) -> None:
        with self.world.changed:
            assert not self.aborted
            self.aborted = True
            self.world.changed.notify_all()

    def _check(self) -> None:
        if self.aborted:
            raise RuntimeError("NCCL communicator was aborted")


@dataclass
class World:
    """All simulated ranks and the connections between them.

    Attributes:
        streams: The simulated streams, which know how long a transfer between ranks takes.
        issued: The operations that each rank has submitted to its streams.
        sent: The number of Gloo messages of each kind from each sender to each receiver.
        bytes: The total size of these messages.
    """

    n: int
    streams: Any
    boxes: dict[Any, deque[Any]] = field(default_factory=dict)
    closed: set[Any] = field(default_factory=set)
    sent: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    bytes: int = 0
    pairs: list[Pair] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)
    here: threading.local = field(default_factory=threading.local)

    def __post_init__(self) -> None:
        self.issued: list[list[tuple[Any, ...]]] = [[] for _ in range(self.n)]

    def box(self, *key: Any) -> deque[Any]:
        """Return the queue of this key."""
        return self.boxes.setdefault(key, deque())

    def pair(self, store: str, own: int, *_: Any) -> Pair:
        pair = Pair(self, store)
        self.pairs.append(pair)
        assert own == (self.here.rank == pair.target)
        return pair

    def run(self, program: Callable[[int], Any]) -> list[Any]:
        """Call a function in one thread for each rank. Return each rank's result or exception."""

        def rank(index: int) -> Any:
            self.here.rank = index
            return program(index)

        return at_once(self.n, rank, 2 * PATIENCE)


class OfEach(threading.local, UserDict[Any, int]):
    """A dictionary of counts, with separate counts for each thread (that is, simulated rank)."""

    def __missing__(self, key: Any) -> int:
        return 0


def simulate_ranks(streams: Any, gpus: Sequence[str]) -> World:
    """Patch torch.distributed so that threads are its ranks, one for each name in `gpus`."""
    world = World(len(gpus), streams)
    patch = streams.patch
    of_distributed: dict[str, Callable[..., Any]] = {
        "is_initialized": lambda: True,
        "get_rank": lambda: world.here.rank,
        "get_process_group_ranks": lambda group: [*range(world.n)],
        "ProcessGroupGloo": lambda store, own, *_: Group(world, store, own),
        "ProcessGroupNCCL": world.pair,
    }
    for name, value in of_distributed.items():
        patch.setattr(dist, name, value, raising=False)
    for module in (connections, transfer):
        patch.setattr(module, "PrefixStore", lambda prefix, store: f"{store}/{prefix}")
    patch.setattr(connections, "_get_default_store", lambda: "")
    patch.setattr(connections, "wait_for_all_ranks", lambda store, own, others: None)
    patch.setattr(connections, "_times_connected", OfEach())

    def seeds_of_one_generator(*given: Any, distributed: Any, **options: Any) -> Seeds:
        """Return the random seeds of a mini-batch as in a pipeline of one process.

        Real ranks exchange their seeds. Simulated ranks need not, as they share one default
        generator.
        """
        return Seeds(*given, **options)

    patch.setattr(batch, "Seeds", seeds_of_one_generator)
    patch.setattr(transfer, "identity", lambda device: gpus[device.index].ljust(36).encode())
    return world
