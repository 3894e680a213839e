"""`DistributedGPipe`: a pipeline whose devices are processes."""

import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from math import inf
from typing import Any, cast
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy

from torchgpipe.distributed.connections import Connections
from torchgpipe.distributed.rank_batch import LossRequest, RankBatch
from torchgpipe.distributed.same_data import checksums, warn_if_unlike
from torchgpipe.engine.arrangement import arranged
from torchgpipe.engine.batch import WorkersEngine
from torchgpipe.layers.devices import choose_devices
from torchgpipe.layers.split import Init
from torchgpipe.partitioned import Partitioned
from torchgpipe.schedules import Schedule
from torchgpipe.skip.layout import Crossing, skip_layout
from torchgpipe.step.losses import run_step
from torchgpipe.step.request import StepRequest
from torchgpipe.task.guards.layers import modules_of
from torchgpipe.task.guards.randomness import check_apart, own_generators
from torchgpipe.tensors._autograd import backward_id, sharded
from torchgpipe.tensors.checkpoint import Mode
from torchgpipe.tensors.microbatch import TensorOrTensors, check


class DistributedGPipe(Partitioned):
    """Train an `nn.Sequential` by pipeline parallelism over processes, each of which holds one partition or several.

        model = DistributedGPipe(layers, balance=[2, 3], chunks=8)             # on every rank
        loss = model.step(nn.functional.cross_entropy, x, target)             # x is used on rank 0, target on the last

    Output and gradients are those of `GPipe` on one process, which has the same arguments and rules. Parameters,
    gradients, buffers and state are those of this rank's layers, under the names that they have in the model. So an
    optimizer on each rank updates its part, and the ranks' states together are the model's.

    Args:
        module: the layers, alike on every rank. On device `meta` they take no memory, and need `init`.
        balance: layers per partition, of which there are as many as ranks, or v times as many if the schedule has v on
            each.
        mesh: a dimension of a mesh, whose ranks hold the partitions; by default all ranks.
        device: this rank's; `"cuda"` is the current GPU. Between GPUs, tensors travel by NCCL if each rank has one of
            its own, or else through the host's memory.
        init: as for `GPipe`, for the layers of this rank.
        timeout: after how many seconds a rank counts as failed that gives no sign of life, or whose task neither ends
            nor computes, and all ranks if all wait for each other; `None` is never. It has to be longer than the
            largest message takes.
        silence: the old name of `timeout`, which will go.
        chunks, checkpoint, deferred_batch_norm, schedule: as for `GPipe`. "The last rank" is that of the last stage; of
            ZBVZeroBubble, it is rank 0.

    Attributes:
        balance, chunks, checkpoint, observer, schedule, timeout: as of `GPipe` and above.
        partitions: this rank's; `partition`: the only one, an `nn.Sequential`.
        rank: this rank's index among those of the pipeline.

    Raises:
        RuntimeError: there is no process group.
        TypeError, ValueError: as `GPipe`; ranks share a parameter, a buffer that changes, or a generator; there are
            not v partitions for each rank; a layer is on `meta`, and there is no `init`.
    """

    _traced_instead = (
        "load the states of all ranks into the layers without a pipeline, and trace or export those"
    )

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        mesh: DeviceMesh | None = None,
        device: int | str | torch.device = "cpu",
        chunks: int = 1,
        checkpoint: Mode = "except_last",
        deferred_batch_norm: bool = False,
        init: Init | None = None,
        schedule: str | Schedule = "GPipe",
        timeout: float | None = 300.0,
        silence: Any = ...,
    ) -> None:
        super().__init__(
            module,
            balance,
            chunks=chunks,
            checkpoint=checkpoint,
            deferred_batch_norm=deferred_batch_norm,
            schedule=schedule,
        )
        self.timeout: float | None = timeout
        if silence is not ...:
            _warn_of_silence(2)
            self.timeout = silence
        if not dist.is_initialized():
            raise RuntimeError(
                "ranks have not met: call torch.distributed.init_process_group(), in a program that torchrun started"
            )
        if mesh is not None and (not isinstance(mesh, DeviceMesh) or mesh.ndim != 1):
            raise TypeError(
                f"mesh must be one dimension of a DeviceMesh, such as mesh['pp'], but got {mesh!r}"
            )
        if not isinstance(device, int | str | torch.device):
            raise TypeError(f"device must be this rank's device, but got {device!r}")
        (device,) = choose_devices([device], 1)
        self._ranks = dist.get_process_group_ranks(
            dist.group.WORLD if mesh is None else mesh.get_group()
        )
        self.rank = self._ranks.index(dist.get_rank())
        n, stages = len(self._ranks), len(self.balance)
        _, devices, _, placement = arranged(schedule, stages, n)
        if devices != n:
            raise ValueError(
                f"the balance {self.balance} has {stages} partitions, but there are {n} ranks; give each rank a number "
                f"of layers, or start {devices} processes (torchrun --nproc-per-node)"
            )
        check_apart([own_generators(modules_of(partition)) for partition in self._partitions])
        self._crossings = skip_layout(self._partitions)
        named = [
            (name, None if is_lazy(p) else (*p.shape,)) for name, p in module.named_parameters()
        ]
        self._alike = crc32(repr(named).encode())
        here = [device if rank == self.rank else None for rank in placement]
        self._hold(here, [f"rank {rank}" for rank in placement], init)
        self._connected()  # a rank may fail before its first mini-batch

    def _build(self) -> None:
        super()._build()
        arrangement, made = (
            arranged(self._schedule, len(self.balance), len(self._ranks)),
            self._schedule,
        )
        self._steps = WorkersEngine(self._stages, arrangement)
        self._order = (
            made.lower()
            if isinstance(made, str)
            else f"{made.name}, {crc32(repr(made).encode()):x}"
        )
        self._connections: Connections | None = None
        self._serial = 0
        self._warned = False  # of samples that differ
        if "silence" in vars(self):  # of a pipeline that was pickled when `timeout` was called that
            self.timeout = vars(self).pop("silence")

    def _layout(self) -> list[Crossing]:
        return self._crossings

    @property
    def silence(self) -> float | None:
        """The old name of `timeout`."""
        _warn_of_silence(2)
        return self.timeout

    @silence.setter
    def silence(self, timeout: float | None) -> None:
        """Set `timeout` by its old name."""
        _warn_of_silence(3)  # through `nn.Module.__setattr__`
        self.timeout = timeout

    @property
    def partition(self) -> nn.Sequential:
        """This rank's layers."""
        if len(self._partitions) > 1:
            raise ValueError(
                f"rank {self.rank} holds {len(self._partitions)} partitions: see model.partitions"
            )
        return cast(nn.Sequential, self._partitions[0])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a mini-batch through the pipeline; the input counts on the first rank only.

        Returns:
            On the last rank, the output. On the others a zero whose `backward()` runs this rank's part of the
            backward, or `None` where no gradient can be asked for.

        Raises:
            RankFailed: another rank has failed.
        """
        return self._uncompiled(self._run, args, kwargs, None)

    def _carry_out(self, args: tuple[Any, ...], kwargs: dict[str, Any], request: Any) -> Tensor:
        return cast(Tensor, self._run(args, kwargs, request))

    def loss(self, criterion: Callable[[Any, Any], Tensor], input: Any, target: Any) -> Tensor:
        """Return `criterion(output, target)`, the same number on every rank; all ranks call `backward()` on it.

        `input` counts on the first rank, `criterion` and `target` on the last.

        Raises:
            TypeError: `criterion` does not return a scalar.
            RankFailed: another rank has failed.
        """
        return cast(Tensor, self._uncompiled(self._hooked, input, LossRequest(criterion, target)))

    @contextmanager
    def _together(self, doing: str, **alike: float) -> Iterator[Callable[[Tensor], list[Tensor]]]:
        connections = self._connected()
        with connections.call(self._serial, doing):
            yield partial(connections.exchange, doing, alike=alike)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        raise TypeError(
            "DistributedDataParallel would miss the calls of a pipeline's loss(); use replicate(model, device_mesh=...)"
            " or fully_shard(model.partition, mesh=...)"
        )

    def close(self) -> None:
        """Close the connections to other ranks, and count mini-batches anew; the next call connects again.

        All ranks call it: in the end, or after a failure, where some may have begun one mini-batch more than others.
        """
        if self._connections is not None:
            self._connections.close()
        self._serial = 0

    def _connected(self) -> Connections:
        if self._connections is None or self._connections.closed:
            s = self.timeout
            if s is not None and (not isinstance(s, int | float) or s is True or not 0 < s < inf):
                raise ValueError(
                    f"timeout must be a positive number of seconds, or None, but got {s!r}"
                )
            if not dist.is_initialized() or dist.get_rank() != self._ranks[self.rank]:
                raise RuntimeError(
                    f"this is the part of rank {self._ranks[self.rank]}, and runs on that rank only; to begin with "
                    "other ranks, make a pipeline and load the state"
                )
            self._connections = Connections(self._ranks, self.rank, self.timeout)
            # Not the connections themselves, which a pipeline may close; those that are open are kept by their threads.
            weakref.finalize(self, _close, weakref.ref(self._connections)).atexit = False
        if self._connections.timeout != self.timeout:
            raise RuntimeError(
                f"timeout was changed from {self._connections.timeout} to {self.timeout} while ranks are connected; "
                "call close() on all of them first"
            )
        return self._connections

    def _run(self, args: Any, kwargs: Any, request: StepRequest | LossRequest | None) -> Any:
        connections, stage = self._connected(), self._stages[0]
        self._serial += 1

        def run() -> Any:
            micro_batches = [] if stage.index else self._scattered(args, kwargs)
            placement, late = self._steps.arrangement.placement, self._order == "gpipe"
            connections.meet(stage.device, placement, self._crossings, late=late)
            kind = stage.device.type
            settings = {
                "the balance": (*self.balance,),
                "the schedule": self._order,
                "chunks": self.chunks,
                "checkpoint": self.checkpoint,
                "training": self.training,
                "deferred_batch_norm": bool(self._deferred),
                "autocast": kind != "meta"
                and torch.is_autocast_enabled(kind)
                and str(torch.get_autocast_dtype(kind)),
                "the call": "step()"
                if isinstance(request, StepRequest)
                else "loss()"
                if request
                else "forward",
                "the kind of device": kind,
                "timeout": self.timeout and float(self.timeout),
                # Or two pipelines that ranks have made in different orders could train as one.
                "the checksum of its parameters' names and shapes": getattr(
                    self, "_alike", 0
                ),  # of an older pickle
            }
            given = checksums(self._serial, (args, kwargs), getattr(request, "target", None))
            batch = RankBatch(connections, settings, micro_batches, given, owner=self)
            if batch.last and not self._warned:
                self._warned = warn_if_unlike(given, batch.given, self.rank, placement[0])
            if isinstance(request, StepRequest):
                return run_step(batch, micro_batches, batch.sizes, request, self._seen)
            return batch.finished(request)

        with connections.call(self._serial, "the call"):
            if backward_id() != -1:
                raise RuntimeError(
                    "a pipeline over ranks cannot run within a backward, which each rank reaches at a time of its own "
                    "(by torch.utils.checkpoint around it?); let the pipeline checkpoint instead"
                )
            if sharded([self]):
                raise TypeError(
                    "fully_shard of a pipeline would gather parameters once for all micro-batches; use it on the "
                    "partition: fully_shard(model.partition, mesh=...)"
                )
            self._check()
            result = self._mini_batch(run)
        wanted = (
            request is not None
            or self.rank == self._steps.arrangement.placement[-1]
            or result.requires_grad
        )
        return result if wanted else None

    def _scattered(self, args: Any, kwargs: Any) -> list[TensorOrTensors]:
        if self._signature is not None:
            args, kwargs = (self._signature.flat(args, kwargs),), {}
        if len(args) != 1 or kwargs:
            given = ", ".join([f"{len(args)} by place", *kwargs])
            raise TypeError(
                f"the pipeline takes one input, a tensor or a tuple of tensors, but got {given}"
            )
        check(args[0])
        return self._micro_batches(args[0])


def _close(reference: weakref.ref[Connections]) -> None:
    # In a thread of its own: nothing may wait where a pipeline is collected, which can be anywhere.
    if (connections := reference()) is not None:
        threading.Thread(target=connections.close, name="gpipe-closes", daemon=True).start()


def _warn_of_silence(level: int) -> None:
    line = "DistributedGPipe: silence is called timeout now, and the old name will go"
    warnings.warn(line, DeprecationWarning, stacklevel=level + 1)
