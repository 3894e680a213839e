"""Ranks that are threads of this process, with stand-ins for what needs processes or GPUs.

`torch.distributed` is played by boxes in memory, and NCCL by operations that take their time on simulated streams
(../conftest.py). The pipeline, its links, its wires and their threads are real. What NCCL does in truth, only GPUs can
tell.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from torch import Tensor

from torchgpipe.distributed import cuda

PATIENCE = 30.0


@dataclass(eq=False)
class Parcel:
    """Tensors that were sent. For NCCL: `ready` is when its sender's stream comes to it, `end` when it has arrived."""

    group: Group
    tensors: list[Tensor]
    ready: float = 0.0
    before: Parcel | None = None  # on the same way
    end: float = 0.0
    taken: bool = False

    def wait(self) -> None:
        assert threading.current_thread().name.startswith("gpipe-to-"), "a program waits for a stream"
        world = self.group.world
        with world.changed:
            assert world.changed.wait_for(lambda: self.taken or self.group.aborted, PATIENCE)


class Work(NamedTuple):
    group: Group
    peer: int
    attempt: Callable[[], bool]

    def wait(self, timeout: timedelta | None = None) -> None:
        world, name, own = self.group.world, self.group.name, self.group.own
        with world.changed:
            if timeout is not None:  # nothing will come, and gloo closes the connections of the group
                world.closed.add((name, own))
                world.changed.notify_all()
            lost = {(name, own), (name, self.peer)}
            done = world.changed.wait_for(lambda: (self.attempt() and "done") or lost & world.closed, PATIENCE)
            world.changed.notify_all()
        if done != "done":
            raise RuntimeError("Connection closed by peer")


@dataclass(eq=False)
class Group:
    """A process group as one of its ranks sees it."""

    world: World
    name: tuple[Any, ...]
    own: int
    aborted: bool = False

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        parcel = Parcel(self, [x.clone() for x in tensors])
        with self.world.changed:
            self.world.boxes[self.name, self.own, peer, tag].append(parcel)
            self.world.changed.notify_all()
        return Work(self, peer, lambda: parcel.taken)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        box = self.world.boxes[self.name, peer, self.own, tag]

        def take() -> bool:
            if box:
                parcel = box.popleft()
                tensors[0][: len(parcel.tensors[0])] = parcel.tensors[0]
                parcel.taken = True
                return True
            return False

        return Work(self, peer, take)

    def abort(self) -> None:
        with self.world.changed:
            self.aborted = True
            self.world.changed.notify_all()


class Operation(NamedTuple):
    kind: Any
    tensor: Tensor
    group: Group
    group_peer: int


@dataclass
class World:
    """All ranks. `seconds` says how long NCCL takes between two of them, `issued` what a rank's program gave it."""

    n: int
    streams: Any
    seconds: Mapping[tuple[int, int], float] = field(default_factory=dict)
    boxes: dict[Any, deque[Parcel]] = field(default_factory=lambda: defaultdict(deque))
    closed: set[Any] = field(default_factory=set)
    groups: list[Group] = field(default_factory=list)
    made: Counter[Any] = field(default_factory=Counter)
    latest: dict[Any, Parcel] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)
    here: threading.local = field(default_factory=threading.local)

    def __post_init__(self) -> None:
        self.issued: list[list[tuple[Any, ...]]] = [[] for _ in range(self.n)]

    def new_group(self, ranks: list[int], *, backend: str, **_: Any) -> Group:
        rank = self.here.rank
        with self.changed:
            self.made[backend, (*ranks,), rank] += 1
            name = (backend, *ranks, self.made[backend, (*ranks,), rank])
            self.groups.append(Group(self, name, ranks.index(rank)))
            return self.groups[-1]

    def move(self, operations: list[Operation]) -> list[Any]:
        """Play `batch_isend_irecv`; the first on a way is its trial, and takes no time."""
        kind, _, group, _ = operations[0]
        if group.aborted:
            raise RuntimeError("NCCL communicator was aborted")
        stream, tensors = self.streams.current[-1], [each.tensor for each in operations]
        _, low, high, _ = group.name
        rank, other = (low, high) if group.own == 0 else (high, low)
        trial = (group.name, "tried") not in self.closed
        if kind is dist.isend:
            if (before := self.latest.get(group.name)) is not None:
                self.issued[rank].append(("send", rank, other, len(tensors)))
            parcel = Parcel(group, [x.clone() for x in tensors], stream.clock, before)
            self.latest[group.name] = stream.work = parcel
            with self.changed:
                self.boxes[group.name].append(parcel)
                self.changed.notify_all()
            return []
        box = self.boxes[group.name]
        if trial:
            self.closed.add((group.name, "tried"))
            with self.changed:
                assert self.changed.wait_for(lambda: box, PATIENCE)
        assert box, "a receive was issued before its sending"
        parcel = box.popleft()
        start = max(parcel.ready, parcel.before.end if parcel.before else 0.0, stream.clock)
        stream.clock = parcel.end = start if trial else start + self.seconds.get((low, high), 0.0)
        for x, y in zip(tensors, parcel.tensors, strict=True):
            x.copy_(y)
        with self.changed:
            parcel.taken = True
            self.changed.notify_all()
        return []

    def run(self, program: Callable[[int], Any]) -> list[Any]:
        """Run a program on every rank; return what each returns, or its exception."""
        results: list[Any] = [None] * self.n

        def rank(index: int) -> None:
            self.here.rank = index
            try:
                results[index] = program(index)
            except BaseException as error:
                results[index] = error

        threads = [threading.Thread(target=rank, args=(index,), daemon=True) for index in range(self.n)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * PATIENCE)
            assert not thread.is_alive(), "ranks wait for each other"
        return results


def play(
    monkeypatch: pytest.MonkeyPatch,
    streams: Any,
    gpus: Sequence[str],
    seconds: Mapping[tuple[int, int], float] = MappingProxyType({}),
) -> World:
    """Let threads be ranks, whose GPUs have these names."""
    world = World(len(gpus), streams, seconds)
    for name, value in {
        "ProcessGroup": Group,
        "P2POp": lambda kind, tensor, *, group, group_peer: Operation(kind, tensor, group, group_peer),
        "is_initialized": lambda: True,
        "get_rank": lambda: world.here.rank,
        "get_process_group_ranks": lambda group: [*range(world.n)],
        "new_group": world.new_group,
        "batch_isend_irecv": world.move,
        "destroy_process_group": world.groups.remove,
    }.items():
        monkeypatch.setattr(dist, name, value)
    monkeypatch.setattr(cuda, "_identity", lambda device: gpus[device.index].ljust(36).encode())
    return world
