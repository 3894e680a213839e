"""Transfer tensors from the GPU of one rank to the GPU of another rank.

A channel carries messages from one stage to another. The description of a message (the shapes and
types of its tensors) always goes over gloo. The tensors go in one of two ways, which is the same on
all ranks:

    NCCL      from GPU to GPU; each channel has an NCCL communicator of two ranks (nccl.py)
    staging   through pinned memory of the hosts, and over gloo with the description

NCCL needs a separate GPU for each rank. If NCCL does not connect one of the ranks, all ranks use
staging. In both ways, each channel has its own stream, so that tensors are transferred while tasks
compute. The channel's stream waits for the compute stream before a tensor is sent. The compute
stream waits for the channel's stream until a tensor has arrived. The thread that runs the tasks
does not wait for streams.

An operation of NCCL occupies a part of its GPU while it waits for the other rank's operation. Two
rules keep this time short:

- A rank begins to receive tensors when their description has arrived. By then, the other rank has
  already put the send operation into its stream.
- In GPipe's schedule, a skip from stage s to stage p is not sent when it is made, but p - s - 1
  tasks later. Only then is stage p about to need it.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from torchgpipe.distributed.channels.layout import dense, row
from torchgpipe.distributed.channels.nccl import NO_GPU, UNFIT, Pair, PairAddress, Pairs, identity
from torchgpipe.skip.layout import Crossing
from torchgpipe.tensors import accelerator
from torchgpipe.tensors.copy import StreamFence
from torchgpipe.tensors.microbatch import Flat

Stages = tuple[int, int]
"""The two stages that a channel connects."""


class Departure(NamedTuple):
    """The tensors of a message that is about to be sent, and what its sender has to wait for.

    Attributes:
        tensors: The tensors to send over gloo. A `meta` tensor stands for a tensor that NCCL sends;
            only its description goes over gloo.
        before: A GPU event to wait for before the tensors are sent, or `None`.
        after: A GPU event to wait for after the tensors were sent over gloo, or `None`.
    """

    tensors: Flat
    before: torch.Event | None = None
    after: torch.Event | None = None


class Transfer:
    """Send the tensors of a channel from this GPU, or receive them on this GPU.

    Args:
        device: This rank's device.
        pair: This rank and the other rank, connected by NCCL. With `None`, tensors are copied
            through host memory.
        late: By how many messages the sender delays each message: it sends a message only when
            `late` further messages wait behind it.

    Attributes:
        pins: Whether tensors that come over gloo should be in pinned memory.
        late: By how many messages the sender delays each message.
    """

    def __init__(self, device: torch.device, pair: Pair | None = None, late: int = 0) -> None:
        self._device = device
        self._stream = accelerator.new_stream(device) if pair is None else pair.stream
        self._pair = pair
        self.pins = pair is None and accelerator.has_streams(device)
        self.late = late

    def begin(self) -> None:
        """Make this GPU the current device of the calling thread."""
        accelerator.make_current(self._device)

    def depart(self, tensors: Flat) -> Departure:
        """Begin to send tensors, as soon as the compute stream has made them.

        Return the tensors that the caller still has to send over gloo, and the GPU event to wait
        for before or after sending them.
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
        staged = self._pair is None
        with accelerator.using(self._stream):
            sent = self._copy_to_host(leaving) if staged else self._send_by_nccl(leaving)
            end = accelerator.sleep_until_now(self._device)
        over_gloo = tuple([None if x is None else sent.get(x, x) for x in moved])
        if staged:
            return Departure(over_gloo, before=end)
        return Departure(over_gloo, after=end)

    def _copy_to_host(self, leaving: Sequence[Tensor]) -> dict[Tensor, Tensor]:
        """Begin to copy tensors to the host; return a dictionary with the copy of each tensor."""
        # PyTorch reuses pinned memory.
        copies = {x: torch.empty_like(x, device="cpu", pin_memory=self.pins) for x in leaving}
        for x, y in copies.items():
            y.copy_(x, non_blocking=True)
        return copies

    def _send_by_nccl(self, leaving: Sequence[Tensor]) -> dict[Tensor, Tensor]:
        """Send tensors by NCCL; return a dictionary with a `meta` tensor that describes each."""
        described = {x: torch.empty_like(x, device="meta") for x in leaving}
        self._move(leaving)
        return described

    def arrive(self, tensors: Flat) -> Flat:
        """Move a received message's tensors to this GPU; make the compute stream wait for them."""
        if all(x is None for x in tensors):
            return tensors
        fence = StreamFence(self._device)
        arriving: list[Tensor | None] = []
        received = []
        with accelerator.using(self._stream):
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
        """Wait until all transfers that have begun on this channel have ended."""
        if self._stream is not None:
            self._stream.synchronize()

    def _placed(self, x: Tensor) -> Tensor:
        if x.is_meta:
            return torch.empty_like(x, device=self._device)
        return x.to(self._device, non_blocking=True)

    def _move(self, tensors: Sequence[Tensor]) -> None:
        """Send or receive tensors by NCCL; make the current stream wait for the transfer."""
        if self._pair is not None:
            self._pair.move([row(x) for x in tensors if x.numel()])


class _Channel(NamedTuple):
    """A channel from one stage to another: its kind, its stages, their ranks."""

    kind: str
    stages: Stages
    source: int
    target: int

    def has_end(self, rank: int) -> bool:
        """Return whether this channel connects the given rank with another, in either direction."""
        return self.source != self.target and rank in (self.source, self.target)


class Transfers:
    """All transfers between the GPU of one rank and other ranks.

    Args:
        own: This rank.
        store: The key-value store through which the two ranks of each pair connect.

    Attributes:
        by_channel: The transfer of each channel. A key has the kind of the channel, the other
            rank, and the channel's two stages, the lower stage first.
    """

    def __init__(self, own: int, store: Store) -> None:
        self._own = own
        self._store = store
        self._pairs = Pairs()
        self.by_channel: dict[tuple[str, int, Stages], Transfer] = {}

    def connect(
        self,
        device: torch.device,
        placement: Sequence[int],
        crossings: Sequence[Crossing],
        exchange: Callable[[Tensor], list[Tensor]],
        *,
        late: bool,
    ) -> None:
        """Make a `Transfer` for each channel between this rank and another rank.

        All ranks call this method together. The transfers are added to `by_channel`. They use NCCL
        if every rank has a separate GPU and NCCL connects all ranks, and host memory otherwise. If
        this rank's device is the CPU, no transfer is needed, and `by_channel` stays empty.

        Args:
            device: This rank's device.
            placement: The rank of each stage.
            crossings: The skip connections from one stage to another.
            exchange: A function that sends a tensor to all ranks, and returns the tensors of all
                ranks.
            late: Whether skips are sent only shortly before they are needed.
        """
        gpu = identity(device)
        told = exchange(torch.tensor(list(gpu), device="cpu"))
        if gpu == NO_GPU:
            return
        channels = [
            channel for channel in _channels(placement, crossings) if channel.has_end(self._own)
        ]
        gpus = {bytes(x.tolist()) for x in told}
        separate = len(gpus - {NO_GPU, UNFIT}) == len(told)
        pairs = self._paired(device, channels, exchange) if separate else []
        for k, channel in enumerate(channels):
            tasks = late * (abs(channel.stages[1] - channel.stages[0]) - 1)
            transfer = Transfer(device, pairs[k], tasks) if pairs else Transfer(device)
            low, high = sorted(channel.stages)
            other = channel.source + channel.target - self._own
            self.by_channel[channel.kind, other, (low, high)] = transfer
        # The last stage's rank tells all others the loss.
        last = placement[-1]
        self.stage("loss", range(len(told)) if self._own == last else [last], device)

    def stage(self, kind: str, peers: Iterable[int], device: torch.device) -> None:
        """Add to `by_channel` a transfer through host memory for each channel of a kind.

        If this rank's device is the CPU, no transfer is needed, and none is added.

        Args:
            kind: The kind of the channels, such as "loss" (`channel.KINDS` lists all kinds).
            peers: The ranks at the other ends of the channels.
            device: This rank's device.
        """
        if identity(device) == NO_GPU:
            return
        for peer in peers:
            self.by_channel[kind, peer, (0, 0)] = Transfer(device)

    def _paired(
        self,
        device: torch.device,
        channels: Sequence[_Channel],
        exchange: Callable[[Tensor], list[Tensor]],
    ) -> Sequence[Pair]:
        """Connect the two ranks of each channel by NCCL; return a list of pairs.

        If NCCL does not connect all ranks, there is a warning, and the list is empty.
        """
        addresses = []
        for kind, stages, source, target in channels:
            store = PrefixStore(f"stages {stages}/{kind} {source} {target}", self._store)
            addresses.append(PairAddress(store, int(self._own == target)))
        why = self._pairs.connect(device, addresses)
        told = exchange(torch.tensor([bool(why)], device="cpu"))
        failed = [str(rank) for rank, (fails,) in enumerate(told) if fails]
        if not failed:
            return self._pairs.pairs
        self._pairs.abort()
        more = f" ({why})" if why else ""
        warnings.warn(
            f"NCCL does not connect the GPUs of all ranks: it fails on rank {', '.join(failed)}"
            f"{more}; so tensors go through host memory, which is slower; set NCCL_DEBUG=INFO to "
            "see what NCCL does",
            stacklevel=2,
        )
        return []

    def finish(self) -> None:
        """Wait until all transfers of tensors that have begun on this GPU have ended."""
        for transfer in self.by_channel.values():
            transfer.finish()

    def abort(self) -> None:
        """End all transfers by NCCL, also those that wait for a rank; any thread can call this."""
        self._pairs.abort()


def _channels(placement: Sequence[int], crossings: Sequence[Crossing]) -> Iterator[_Channel]:
    """Yield each channel between two stages, in the same order on all ranks."""
    kinds: list[tuple[str, Stages]] = []
    for source, target in pairwise(range(len(placement))):
        kinds.append(("forward", (source, target)))
        kinds.append(("backward", (target, source)))
    far = {(crossing.source, crossing.target) for crossing in crossings}
    for source, target in sorted(far):
        kinds.append(("forward skips", (source, target)))
        kinds.append(("backward skips", (target, source)))
    for kind, (source, target) in kinds:
        yield _Channel(kind, (source, target), placement[source], placement[target])
