"""Transfer tensors between the GPUs of two ranks by NCCL.

When a rank dies, the ranks that survive raise `RankFailed`, and may go on without it. They could
not go on with PyTorch's usual process groups for NCCL. By default, each group has a thread (the
watchdog). When NCCL reports that the other rank has died, the watchdog asks all processes of the
job, through their store, to write down their state and to end. A minute later, the watchdog ends
its own process.

A pair is a process group of two ranks. Each channel between two stages has a pair of its own. A
pair differs from a usual group in three ways:

- A pair has no watchdog. PyTorch starts none for a group that is made while the environment
  variable TORCH_NCCL_BLOCKING_WAIT is 1. In such a group, `wait()` makes the host wait. So a pair
  calls `block_current_stream()` instead, which only makes a stream wait.
- A pair connects in a separate thread. NCCL connects two ranks at their first transfer, and waits
  for ever if the other rank does not come. The rank's own thread waits only for
  `CONNECT_SECONDS`, or until `abort` is called.
- All pairs are aborted at the same time, each in a thread. NCCL frees the memory of a pair only
  when its GPU has nothing to do. If pairs were aborted one after the other, the first would wait
  for the transfers of the others, and these would wait for the dead rank.
"""

import os
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from torchgpipe.caught import in_one_line
from torchgpipe.distributed.channels.message import NEVER
from torchgpipe.engine.relay import Stopped
from torchgpipe.tensors import accelerator

CONNECT_SECONDS = 60.0
"""How many seconds the pairs of a rank may take to connect, all together."""

ABORT_SECONDS = 1.0
"""How many seconds a rank waits until NCCL has aborted its pairs. NCCL may wait for ever."""

NO_GPU, UNFIT = b"0" * 36, b"-" * 36
"""Values in place of a GPU's UUID: for a rank on the CPU, and for a rank that cannot use NCCL."""


class Pair:
    """Two ranks that NCCL connects. Rank 0 of the pair sends, and rank 1 receives.

    Args:
        group: The process group of the two ranks.
        peer: The other rank's index in the group: 0 or 1.
        stream: The stream of this rank's GPU in which the transfers run.
    """

    def __init__(self, group: Any, peer: int, stream: torch.Stream | None) -> None:
        self._group = group
        self._peer = peer
        self.stream = stream
        self._aborted = False
        self._ending = threading.Lock()

    def move(self, rows: Sequence[Tensor]) -> None:
        """Send tensors of one dimension, or receive into them; make the current stream wait.

        Rank 0 of the pair sends, and rank 1 receives. The stream waits for the transfer's end.

        Raises:
            Stopped: If the pair was aborted.
        """
        operation = self._group.send if self._peer else self._group.recv
        try:
            for x in rows:
                operation([x], self._peer, 0).block_current_stream()
        except RuntimeError:
            if self._aborted:
                raise Stopped from None
            raise

    def abort(self) -> None:
        """End all transfers between these two ranks, even if one of them waits for a failed rank.

        Any thread can call this method.
        """
        with self._ending:
            aborted = self._aborted
            self._aborted = True
        if not aborted:
            self._group.abort()


class PairAddress(NamedTuple):
    """What is needed to connect a pair: two ranks that transfer tensors by NCCL.

    Attributes:
        store: The key-value store through which the two ranks connect.
        own: This rank's index in the pair: 0 sends, and 1 receives.
    """

    store: Store
    own: int


class Pairs:
    """All pairs of this rank: a pair is this rank and another rank, which NCCL connects.

    Attributes:
        pairs: The pairs, in the order in which `connect` was given their addresses.
    """

    def __init__(self) -> None:
        self.pairs: list[Pair] = []
        self._aborted = False
        self._over = threading.Event()  # set when connecting has ended in any way
        self._why = ""

    def connect(self, device: torch.device, addresses: Sequence[PairAddress]) -> str:
        """Make a pair of ranks for each address, and connect the two ranks by a first transfer.

        Args:
            device: This rank's GPU.
            addresses: The address of each pair. All ranks have the pairs in the same order.

        Returns:
            A text that says why NCCL does not connect all pairs. It is empty if NCCL connects them.

        Raises:
            Stopped: If the pairs were aborted meanwhile, because another rank has failed.
        """
        self._why = f"it has not connected after {CONNECT_SECONDS:g} s"
        try:
            with _without_watchdog():
                for store, own in addresses:
                    self.pairs.append(_new_pair(device, store, own))
        except (RuntimeError, ValueError) as error:
            self._why = in_one_line(error)
        else:
            run = partial(self._connect, device)
            with warnings.catch_warnings():
                # PyTorch warns of groups that connect at their first transfer.
                warnings.filterwarnings("ignore", "An unbatched P2P op")
                threading.Thread(target=run, name="gpipe-connects", daemon=True).start()
                self._over.wait(CONNECT_SECONDS)
        if self._aborted:
            self.abort()  # the pairs that were made after the first call of `abort`
            raise Stopped
        return self._why

    def _connect(self, device: torch.device) -> None:
        why = ""
        try:
            accelerator.make_current(device)
            # All ranks go through the pairs in the same order, so there is no deadlock.
            for pair in self.pairs:
                with accelerator.using(pair.stream):
                    pair.move([torch.zeros(1, device=device)])
                if pair.stream is not None:
                    pair.stream.synchronize()
        except Exception as error:  # of NCCL, of CUDA, or `Stopped`
            why = in_one_line(error)
        self._why = why
        self._over.set()

    def abort(self) -> None:
        """End the transfers of all pairs at the same time, and `connect` if it still runs.

        A pair is two ranks that NCCL connects. Any thread can call this method.
        """
        self._aborted = True
        self._over.set()
        threads = []
        for pair in self.pairs:
            thread = threading.Thread(target=pair.abort, name="gpipe-aborts", daemon=True)
            threads.append(thread)
            thread.start()
        deadline = time.monotonic() + ABORT_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def _new_pair(device: torch.device, store: Store, own: int) -> Pair:
    # `new_group` is not used here, because all ranks may have to call it.
    nccl: Any = dist.ProcessGroupNCCL
    return Pair(nccl(store, own, 2, NEVER), 1 - own, accelerator.new_stream(device))


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """Within this context, make process groups for NCCL without their watchdog threads.

    When another rank dies, the watchdog would end this process, too.
    """
    name = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def identity(device: torch.device) -> bytes:
    """Return the UUID of this rank's GPU, so that ranks can see whether they share a GPU.

    Without a GPU, return `NO_GPU`. If NCCL cannot be used on this rank, return `UNFIT`.
    """
    if not accelerator.has_streams(device):
        return NO_GPU
    # With this variable, the host waits for NCCL's transfers, and so for other ranks.
    blocking = os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0"
    if blocking or not dist.is_nccl_available():
        return UNFIT
    return str(accelerator.properties(device).uuid).encode()
