"""CUDA: how tensors get from one rank's GPU to another's.

Descriptions of messages always go over gloo. The tensors go one of two ways, the same on all ranks:

    NCCL      from GPU to GPU, by a process group of two ranks for each wire
    staging   through pinned memory of the hosts, and over gloo with their description

NCCL needs a GPU for each rank. Either way a wire has a stream of its own, so that tensors travel while tasks compute.
This waits for the program's stream, and the program's stream for what arrives. Only threads of wires wait for streams.

An operation of NCCL keeps a part of its GPU busy until the other rank has begun its own. So a rank receives only when
a description has arrived: by then the other rank has given the sending to its stream. And in GPipe's schedule stage s
sends a skip for stage p not before it has run p - s - 1 more tasks, when stage p is about to need it.
"""

import os
from collections.abc import Callable, Iterator, Sequence
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
"""The timeout of an operation between ranks. A rank may wait as long as another one computes."""

_NO_GPU, _UNFIT = b"0" * 36, b"-" * 36
"""In place of a GPU's UUID: on a CPU, and where NCCL cannot serve the rank."""

_BLOCKING = ("CUDA_LAUNCH_BLOCKING", "TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
"""Variables that make the host wait for an operation of NCCL, and so for other ranks."""


class Departure(NamedTuple):
    """What goes over gloo for a message's tensors, and what to wait for before that is sent, and after."""

    tensors: Flat
    before: torch.cuda.Event | None = None
    after: torch.cuda.Event | None = None


class Transfer:
    """Let the tensors of a wire leave this rank's GPU, or arrive there: by NCCL with rank `peer` of `group`, or staged.

    In a group, rank 0 sends and rank 1 receives. Each message leaves `late` messages later. `pins`: whether what comes
    over gloo shall be in pinned memory.
    """

    def __init__(
        self,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        peer: int = 0,
        late: int = 0,
    ) -> None:
        self._device, self._stream = device, new_stream(device)
        self._group, self._peer = group, peer
        self.pins, self.late = group is None and device.type == "cuda", late
        self._aborted = False

    def begin(self) -> None:
        """Let the thread that calls this use the GPU; waiting for an event, it would take hold of GPU 0 as well."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def depart(self, tensors: Flat) -> Departure:
        """Let tensors leave when the program's stream has done what it was given; those on the host stay there."""
        here = self._device.type
        tensors = tuple(
            [
                x if x is None or x.device.type != here else dense(x.to(self._device))
                for x in tensors
            ]
        )
        leaving = tuple([x for x in tensors if x is not None and x.device.type == here])
        if not leaving:
            return Departure(tensors)
        assert self._stream is not None
        fence = StreamFence(self._device)
        fence.leave()
        fence.hold(self._stream, leaving)
        with using(self._stream):
            if self._group is None:
                # PyTorch keeps pinned memory that is not used any more, and gives it out again.
                sent = {x: torch.empty_like(x, device="cpu", pin_memory=self.pins) for x in leaving}
                for x, y in sent.items():
                    y.copy_(x, non_blocking=True)
            else:
                sent = {x: torch.empty_like(x, device="meta") for x in leaving}
                self._move(leaving)
            # A thread that waits for it sleeps, and leaves the core to others.
            end = self._stream.record_event(torch.cuda.Event(blocking=True))
        over_gloo = tuple([None if x is None else sent.get(x, x) for x in tensors])
        return (
            Departure(over_gloo, before=end)
            if self._group is None
            else Departure(over_gloo, after=end)
        )

    def arrive(self, tensors: Flat) -> Flat:
        """Return what has come over gloo, as tensors on the device; the program's stream waits for them."""
        if all(x is None for x in tensors):
            return tensors
        fence = StreamFence(self._device)
        with using(self._stream):
            arriving = tuple([None if x is None else self._placed(x) for x in tensors])
            pairs = zip(tensors, arriving, strict=True)
            self._move([y for x, y in pairs if x is not None and y is not None and x.is_meta])
        fence.expect(self._stream)
        fence.arrive(arriving)
        return arriving

    def finish(self) -> None:
        """Wait until the stream has done all that it was given."""
        if self._stream is not None:
            self._stream.synchronize()

    def abort(self) -> None:
        """End NCCL's operations, also those that wait for a rank that has failed; any thread may do so."""
        self._aborted, aborted = True, self._aborted
        if self._group is not None and not aborted:
            self._group.abort()

    def _placed(self, x: Tensor) -> Tensor:
        return (
            torch.empty_like(x, device=self._device)
            if x.is_meta
            else x.to(self._device, non_blocking=True)
        )

    def _move(self, tensors: Sequence[Tensor | None]) -> None:
        """Let NCCL send or receive, and the current stream wait for that."""
        try:
            for x in tensors:
                if self._group is not None and x is not None and x.numel():
                    (self._group.send if self._peer else self._group.recv)(
                        [row(x)], self._peer, 0
                    ).wait()
        except RuntimeError:
            if self._aborted:
                raise Stopped from None
            raise


def connect(
    made: dict[tuple[str, int, tuple[int, int]], Transfer],
    device: torch.device,
    own: int,
    placement: Sequence[int],
    crossings: Sequence[Crossing],
    store: Store,
    exchange: Callable[[Tensor], list[Tensor]],
    *,
    late: bool,
) -> None:
    """Add a transfer for each wire of rank `own`, by its kind, the other rank, and the two stages; all ranks do so.

    They use NCCL if every rank has a GPU of its own, and staging otherwise; off CUDA none is needed. Groups meet at
    `store`; `exchange` returns what every rank gives it. `late` says whether skips leave late.
    """
    gpu = _identity(device)
    gpus = [bytes(x.tolist()) for x in exchange(torch.tensor([*gpu], device="cpu"))]
    if gpu == _NO_GPU:
        return
    direct = len({*gpus} - {_NO_GPU, _UNFIT}) == len(gpus)
    for kind, stages in _wires(len(placement), crossings):
        source, target = (placement[s] for s in stages)
        if own not in (source, target) or source == target:
            continue
        group, tasks = None, 0
        if direct:
            # Not by `new_group`, for which all ranks may have to come.
            met = PrefixStore(f"stages {stages}/{kind} {source} {target}", store)
            pair = dist.ProcessGroupNCCL(met, int(own == target), 2, NEVER)  # type: ignore[arg-type]
            group, tasks = cast(dist.ProcessGroup, pair), late * (abs(stages[1] - stages[0]) - 1)
        low, high = sorted(stages)
        made[kind, source + target - own, (low, high)] = transfer = Transfer(
            device, group, int(own == source), tasks
        )
        # A first tensor connects the two. Every rank comes to its groups in this one order, and so in no circle.
        with using(transfer._stream):
            transfer._move([torch.zeros(1, device=device)])
        transfer.finish()
    last = placement[-1]
    for peer in range(len(gpus)) if own == last else [last]:
        made["loss", peer, (0, 0)] = Transfer(device)


def _identity(device: torch.device) -> bytes:
    """Return what tells this rank's GPU from others."""
    if device.type != "cuda":
        return _NO_GPU
    if not dist.is_nccl_available() or any(os.environ.get(name, "0") != "0" for name in _BLOCKING):
        return _UNFIT
    return str(torch.cuda.get_device_properties(device).uuid).encode()


def _wires(stages: int, crossings: Sequence[Crossing]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield kind, source and target of every wire by which tensors travel between stages."""
    far = sorted({(crossing.source, crossing.target) for crossing in crossings})
    for what, pairs in (("", [*pairwise(range(stages))]), (" skips", far)):
        for source, target in pairs:
            yield f"forward{what}", (source, target)
            yield f"backward{what}", (target, source)
