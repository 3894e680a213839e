"""Ranks as threads of this process, with stand-ins for what needs processes or GPUs.

Gloo is replaced by queues in memory, NCCL by operations that take time on simulated streams (../simulated.py). The
pipeline, its links, its wires and their threads are real. Only GPUs can show how the real NCCL behaves.
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
from torchgpipe.distributed.wires import cuda
from torchgpipe.distributed.wires.message import SLOT
from torchgpipe.engine import batch
from torchgpipe.engine.seeds import Seeds

from ..ledger import at_once

PATIENCE = 30.0
GPUS = ["one", "two", "three", "four"]


@dataclass(eq=False)
class Parcel:
    """A tensor on its way."""

    tensor: Tensor
    taken: bool = False


class Work(NamedTuple):
    """A pending gloo operation."""

    group: Group
    peer: int
    parcel: Parcel

    def wait(self, timeout: timedelta | None = None) -> None:
        world, name, own = self.group.world, self.group.name, self.group.own
        patience = PATIENCE if timeout is None else timeout.total_seconds()
        with world.changed:
            if not world.changed.wait_for(
                lambda: self.parcel.taken or self.group.lost(self.peer), patience
            ):
                world.closed.add((name, own))  # gloo closes the connections of the group
                world.changed.notify_all()
        if not self.parcel.taken:
            raise RuntimeError("Connection closed by peer")


@dataclass(eq=False)
class Group:
    """One rank's handle of a gloo process group."""

    world: World
    name: str
    own: int

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        self.world.sent[connections.KINDS[tag % len(connections.KINDS)], self.own, peer] += 1
        self.world.bytes += tensors[0].numel()
        return self._posted(tensors[0].clone(), peer, (self.name, self.own, peer, tag), 0)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        return self._posted(tensors[0], peer, (self.name, peer, self.own, tag), 1)

    def lost(self, peer: int) -> bool:
        return not self.world.closed.isdisjoint({(self.name, self.own), (self.name, peer)})

    def _posted(self, tensor: Tensor, peer: int, wire: tuple[Any, ...], end: int) -> Work:
        """Post a send or a receive, and match sends with receives in the order in which they were posted."""
        parcel = Parcel(tensor)
        with self.world.changed:
            if self.lost(peer):
                raise RuntimeError("Connection closed by peer")
            self.world.box(wire, end).append(parcel)
            sent, expected = self.world.box(wire, 0), self.world.box(wire, 1)
            while sent and expected:
                here, there = sent.popleft(), expected.popleft()
                given, room = len(here.tensor), len(there.tensor)
                # With different sizes, gloo would abort the process or give wrong data.
                assert given in (0, room) or given <= room == SLOT
                there.tensor[:given] = here.tensor
                here.taken = there.taken = True
            self.world.changed.notify_all()
        return Work(self, peer, parcel)


@dataclass(eq=False)
class Move(Parcel):
    """A tensor in transit by NCCL: the time when the sender's stream reaches it, and the time of arrival."""

    pair: Pair | None = None
    ready: float = 0.0
    before: Move | None = None
    end: float = 0.0

    def wait(self) -> None:
        """Wait on the host."""
        assert threading.current_thread().name.startswith("gpipe-to-"), (
            "a program waits for a stream"
        )
        assert self.pair is not None
        world, pair = self.pair.world, self.pair
        with world.changed:
            assert world.changed.wait_for(lambda: self.taken or pair.aborted, PATIENCE)


@dataclass(eq=False)
class Pair:
    """One rank's handle of an NCCL group of sender and receiver. The first transfer takes no time."""

    world: World
    name: str
    aborted: bool = False
    latest: Move | None = None

    def __post_init__(self) -> None:
        self.kind, source, target = self.name.split("/")[-1].rsplit(" ", 2)
        self.source, self.target = int(source), int(target)

    def send(self, tensors: list[Tensor], *_: int) -> Mock:
        self._check()
        world, stream = self.world, self.world.streams.current[-1]
        if self.latest is not None:
            world.issued[self.source].append(("send", self.kind, self.source, self.target))
        self.latest = stream.work = Move(
            tensors[0].clone(), pair=self, ready=stream.clock, before=self.latest
        )
        with world.changed:
            world.box(self.name).append(self.latest)
            world.changed.notify_all()
        return Mock()  # the current stream waits, and its clock says so already

    def recv(self, tensors: list[Tensor], *_: int) -> Mock:
        self._check()
        world, stream, box = self.world, self.world.streams.current[-1], self.world.box(self.name)
        with world.changed:
            assert world.changed.wait_for(lambda: box or self.latest is not None, PATIENCE)
            assert box, "a receive was issued before its sending"
            self.latest = move = box.popleft()
        start = max(move.ready, move.before.end if move.before else 0.0, stream.clock)
        low, high = sorted((self.source, self.target))
        stream.clock = move.end = start + (
            world.streams.seconds.get((low, high), 0.0) if move.before else 0.0
        )
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
    """All ranks.

    `streams` has the seconds of NCCL transfers between ranks. `issued`: the operations that each rank has submitted.
    `sent`: the number of gloo messages of each wire; `bytes`: their total size.
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
        """Return the queue of this key. Either end may be the first to ask."""
        return self.boxes.setdefault(key, deque())

    def pair(self, store: str, own: int, *_: Any) -> Pair:
        """Make a group of NCCL."""
        self.pairs.append(Pair(self, store))
        assert own == (self.here.rank == self.pairs[-1].target)
        return self.pairs[-1]

    def run(self, program: Callable[[int], Any]) -> list[Any]:
        """Run a program on every rank; return what each returns, or its exception."""

        def rank(index: int) -> Any:
            self.here.rank = index
            return program(index)

        return at_once(self.n, rank, 2 * PATIENCE)


class OfEach(threading.local, UserDict[Any, int]):
    """Counters of how often ranks have met, separate for each rank (thread)."""

    def __missing__(self, key: Any) -> int:
        return 0


def simulate_ranks(streams: Any, gpus: Sequence[str]) -> World:
    """Patch torch.distributed so that threads act as ranks, with GPUs of these names."""
    world, patch = World(len(gpus), streams), streams.patch
    for name, value in {
        "is_initialized": lambda: True,
        "get_rank": lambda: world.here.rank,
        "get_process_group_ranks": lambda group: [*range(world.n)],
        "ProcessGroupGloo": lambda store, own, *_: Group(world, store, own),
        "ProcessGroupNCCL": world.pair,
    }.items():
        patch.setattr(dist, name, value, raising=False)
    for module in (connections, cuda):
        patch.setattr(module, "PrefixStore", lambda prefix, store: f"{store}/{prefix}")
    patch.setattr(connections, "_get_default_store", lambda: "")
    patch.setattr(connections, "gather", lambda store, own, others: None)
    patch.setattr(connections, "_made", OfEach())
    # These ranks share one default generator.
    patch.setattr(batch, "Seeds", lambda *given, distributed, **options: Seeds(*given, **options))
    patch.setattr(cuda, "_identity", lambda device: gpus[device.index].ljust(36).encode())
    return world
