"""Transfer tensors from the GPU of one rank to the GPU of another rank.

The descriptions of messages (shapes and types) always go over gloo. The tensors go in one of two
ways, the same on all ranks:

    NCCL      from GPU to GPU, by a process group of two ranks for each wire (message channel)
    staging   through pinned memory of the hosts, and over gloo with their description

NCCL needs a separate GPU for each rank. In both ways, each wire has its own CUDA stream, so that
tensors are transferred while tasks compute. The wire's stream waits for the compute stream before a
tensor is sent, and the compute stream waits for the wire's stream until a tensor has arrived. The
thread that runs the tasks does not wait for streams.

An operation of NCCL occupies a part of its GPU while it waits for the other rank's operation. Two
rules keep this time short:

- A rank begins to receive tensors when their description has arrived. By then, the other rank has
  already put the send operation into its stream.
- In GPipe's schedule, a skip from stage s to stage p is not sent when it is made, but p - s - 1
  tasks later. Only then is stage p about to need it.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from torchgpipe.distributed.wires.layout import dense, row
from torchgpipe.engine.relay import Stopped
from torchgpipe.skip.layout import Crossing
from torchgpipe.tensors.copy import StreamFence, new_stream, using
from torchgpipe.tensors.microbatch import Flat

NEVER = timedelta(days=365)
"""The timeout of operations between ranks. It is long, because other ranks may compute for long."""

Stages = tuple[int, int]
"""The two stages that a wire connects."""

_NO_GPU, _UNFIT = b"0" * 36, b"-" * 36
"""Values in place of a GPU's UUID: for a rank on the CPU, and for a rank that cannot use NCCL."""

_BLOCKING = ("CUDA_LAUNCH_BLOCKING", "TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
"""Environment variables that make the host wait for NCCL operations, and so for other ranks."""


class Departure(NamedTuple):
    """The tensors of a message that is about to be sent, and what its sender has to wait for.

    Attributes:
        tensors: The tensors to send over gloo. A `meta` tensor stands for a tensor that NCCL sends;
            only its description goes over gloo.
        before: An event to wait for before the tensors are sent, or `None`.
        after: An event to wait for after the tensors are sent, or `None`.
    """

    tensors: Flat
    before: torch.cuda.Event | None = None
    after: torch.cuda.Event | None = None


class Transfer:
    """Send the tensors of a wire (message channel) from this GPU, or receive them on this GPU.

    Args:
        device: This rank's device.
        group: The NCCL group of the two ranks, in which rank 0 sends and rank 1 receives. Without a
            group, tensors are copied through host memory.
        peer: The other rank's index in the group.
        late: By how many messages sending is delayed: a message is sent only when `late` later
            messages have been given to the sender.

    Attributes:
        pins: Whether tensors that come over gloo should be in pinned memory.
        late: The argument `late`.
    """

    def __init__(
        self,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        peer: int = 0,
        late: int = 0,
    ) -> None:
        self._device = device
        self._stream = new_stream(device)
        self._group = group
        self._peer = peer
        self.pins = group is None and device.type == "cuda"
        self.late = late
        self._aborted = False

    def begin(self) -> None:
        """Make this GPU the current device of the calling thread.

        Otherwise the thread would also create a CUDA context on GPU 0.
        """
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def depart(self, tensors: Flat) -> Departure:
        """Begin to send tensors, as soon as the compute stream has made them.

        Tensors that are on the host go over gloo.
        """
        here = self._device.type
        moved: list[Tensor | None] = []
        leaving = []
        for x in tensors:
            if x is not None and x.device.type == here:
                x = dense(x.to(self._device))
                leaving.append(x)
            moved.append(x)
        if not leaving:
            return Departure(tuple(moved))
        assert self._stream is not None
        fence = StreamFence(self._device)
        fence.leave()
        fence.hold(self._stream, tuple(leaving))
        staged = self._group is None
        with using(self._stream):
            sent = self._staged(leaving) if staged else self._described(leaving)
            # A thread that waits for a blocking event sleeps, so other threads can use its core.
            end = self._stream.record_event(torch.cuda.Event(blocking=True))
        over_gloo = tuple([None if x is None else sent.get(x, x) for x in moved])
        if staged:
            return Departure(over_gloo, before=end)
        return Departure(over_gloo, after=end)

    def _staged(self, leaving: Sequence[Tensor]) -> dict[Tensor, Tensor]:
        """Begin to copy tensors to the host; return a dictionary with the copy of each tensor."""
        # PyTorch reuses pinned memory.
        copies = {x: torch.empty_like(x, device="cpu", pin_memory=self.pins) for x in leaving}
        for x, y in copies.items():
            y.copy_(x, non_blocking=True)
        return copies

    def _described(self, leaving: Sequence[Tensor]) -> dict[Tensor, Tensor]:
        """Send tensors by NCCL; return a dictionary with a `meta` tensor that describes each."""
        described = {x: torch.empty_like(x, device="meta") for x in leaving}
        self._move(leaving)
        return described

    def arrive(self, tensors: Flat) -> Flat:
        """Return a message's tensors on the device; make the compute stream wait for them."""
        if all(x is None for x in tensors):
            return tensors
        fence = StreamFence(self._device)
        arriving: list[Tensor | None] = []
        received = []
        with using(self._stream):
            for x in tensors:
                y = None if x is None else self._placed(x)
                arriving.append(y)
                if x is not None and y is not None and x.is_meta:
                    received.append(y)
            self._move(received)
        fence.expect(self._stream)
        fence.arrive(tuple(arriving))
        return tuple(arriving)

    def finish(self) -> None:
        """Wait until the stream has done all its work."""
        if self._stream is not None:
            self._stream.synchronize()

    def abort(self) -> None:
        """Abort all NCCL operations, even those that wait for a failed rank.

        Any thread can call this method.
        """
        aborted = self._aborted
        self._aborted = True
        if self._group is not None and not aborted:
            self._group.abort()

    def _placed(self, x: Tensor) -> Tensor:
        if x.is_meta:
            return torch.empty_like(x, device=self._device)
        return x.to(self._device, non_blocking=True)

    def _move(self, tensors: Sequence[Tensor]) -> None:
        """Send or receive tensors by NCCL; make the current stream wait for the transfer."""
        if self._group is None:
            return
        operation = self._group.send if self._peer else self._group.recv
        try:
            for x in tensors:
                if x.numel():
                    operation([row(x)], self._peer, 0).wait()
        except RuntimeError:
            if self._aborted:
                raise Stopped from None
            raise


class Transfers:
    """All transfers between the GPU of one rank and other ranks.

    Args:
        own: This rank.
        store: The key-value store through which the two ranks of each NCCL group connect.

    Attributes:
        made: The transfer of each wire (message channel). A key has the kind of the wire, the other
            rank, and the wire's two stages, the lower stage first.
    """

    def __init__(self, own: int, store: Store) -> None:
        self._own = own
        self._store = store
        self.made: dict[tuple[str, int, Stages], Transfer] = {}

    def connect(
        self,
        device: torch.device,
        placement: Sequence[int],
        crossings: Sequence[Crossing],
        exchange: Callable[[Tensor], list[Tensor]],
        *,
        late: bool,
    ) -> None:
        """Make a transfer for each wire of this rank; all ranks call this method together.

        Transfers use NCCL if every rank has a separate GPU, and host memory otherwise. On the CPU,
        there are no transfers.

        Args:
            device: This rank's device.
            placement: The rank of each stage.
            crossings: The skip connections from one stage to another.
            exchange: A function that sends a tensor to all ranks, and returns the tensors of all
                ranks.
            late: Whether skips are sent only shortly before they are needed.
        """
        gpu = _identity(device)
        told = exchange(torch.tensor(list(gpu), device="cpu"))
        if gpu == _NO_GPU:
            return
        gpus = {bytes(x.tolist()) for x in told}
        direct = len(gpus - {_NO_GPU, _UNFIT}) == len(told)
        for kind, stages in _wires(len(placement), crossings):
            source, target = placement[stages[0]], placement[stages[1]]
            if source == target or self._own not in (source, target):
                continue
            if direct:
                group, peer = self._nccl(kind, stages, source, target)
                tasks = late * (abs(stages[1] - stages[0]) - 1)
                transfer = Transfer(device, group, peer, tasks)
            else:
                transfer = Transfer(device)
            low, high = sorted(stages)
            self.made[kind, source + target - self._own, (low, high)] = transfer
            # Send one tensor now, because NCCL connects two ranks at their first transfer. All
            # ranks go through the wires in the same order, so there is no deadlock.
            with using(transfer._stream):
                transfer._move([torch.zeros(1, device=device)])
            transfer.finish()
        # The last stage's rank tells all others the loss.
        last = placement[-1]
        self.stage("loss", range(len(told)) if self._own == last else [last], device)

    def stage(self, kind: str, peers: Iterable[int], device: torch.device) -> None:
        """Make transfers through host memory for wires of a kind; on the CPU, make none."""
        for peer in peers:
            if device.type == "cuda":
                self.made[kind, peer, (0, 0)] = Transfer(device)

    def _nccl(
        self, kind: str, stages: Stages, source: int, target: int
    ) -> tuple[dist.ProcessGroup, int]:
        """Make the NCCL group of a wire; return the group and the other rank's index in it."""
        # `new_group` is not used here, because all ranks may have to call it.
        store = PrefixStore(f"stages {stages}/{kind} {source} {target}", self._store)
        own = int(self._own == target)
        group = dist.ProcessGroupNCCL(store, own, 2, NEVER)  # type: ignore[arg-type]
        return cast(dist.ProcessGroup, group), 1 - own

    def finish(self) -> None:
        """Wait until the streams of all transfers have done their work."""
        for transfer in self.made.values():
            transfer.finish()

    def abort(self) -> None:
        """Abort all NCCL operations; any thread can call this method."""
        for transfer in list(self.made.values()):
            transfer.abort()


def _identity(device: torch.device) -> bytes:
    """Return the UUID of this rank's GPU, or `_NO_GPU`, or `_UNFIT` if NCCL cannot be used."""
    if device.type != "cuda":
        return _NO_GPU
    blocking = any(os.environ.get(name, "0") != "0" for name in _BLOCKING)
    if blocking or not dist.is_nccl_available():
        return _UNFIT
    return str(torch.cuda.get_device_properties(device).uuid).encode()


def _wires(stages: int, crossings: Sequence[Crossing]) -> Iterator[tuple[str, Stages]]:
    """Yield the kind and the source and target stage of every wire that transfers tensors."""
    for source, target in pairwise(range(stages)):
        yield "forward", (source, target)
        yield "backward", (target, source)
    far = {(crossing.source, crossing.target) for crossing in crossings}
    for source, target in sorted(far):
        yield "forward skips", (source, target)
        yield "backward skips", (target, source)
