"""`DistributedGPipe`: a pipeline in which each device has a process (a rank) of its own."""

import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakTensorKeyDictionary

from torchgpipe.distributed.alike import checksum_of_parameters, settings_of
from torchgpipe.distributed.checks import (
    WITHIN_BACKWARD,
    check_connectable,
    check_group,
    check_request,
    warn_without_parameters,
)
from torchgpipe.distributed.connections import Connections
from torchgpipe.distributed.rank_batch import LossRequest, RankBatch, Request
from torchgpipe.distributed.same_data import checksums, warn_if_unlike
from torchgpipe.distributed.tied import TiedParameters
from torchgpipe.engine.arrangement import arranged
from torchgpipe.engine.batch import ProgramsEngine
from torchgpipe.layers.batches import Divided, divided, the_input
from torchgpipe.layers.checks import SHARDED
from torchgpipe.layers.devices import choose_devices
from torchgpipe.layers.split import Init
from torchgpipe.modules import modules_of
from torchgpipe.partitioned import Partitioned
from torchgpipe.random.generators import check_apart, own_generators
from torchgpipe.schedules import Schedule
from torchgpipe.skip.layout import Crossing, skip_layout
from torchgpipe.step.losses import run_step
from torchgpipe.step.request import StepRequest
from torchgpipe.tensors._autograd import backward_id, sharded
from torchgpipe.tensors.checkpoint import Mode
from torchgpipe.tensors.microbatch import check
from torchgpipe.trace.parts import taken_apart
from torchgpipe.uncompiled import run_uncompiled


class DistributedGPipe(Partitioned):
    """Train an `nn.Sequential` by pipeline parallelism over processes.

        model = DistributedGPipe(layers, balance=[2, 3], chunks=8)   # on every rank
        # x is used on the rank of the first stage, and target on the rank of the last stage
        loss = model.step(nn.functional.cross_entropy, x, target)

    Each process (rank) holds one or more partitions. The output, the gradients and most arguments
    are the same as with `GPipe` in one process. On each rank, the pipeline only has the parameters
    and buffers of this rank's layers, under their names in the whole model. So each rank needs an
    optimizer for its own parameters. The state dicts of all ranks together have the entries of the
    whole model's state dict.

    Args:
        module: The layers, the same on every rank. Layers on the device `meta` take no memory, but
            need the argument `init`.
        balance: How many layers each partition has. There are as many partitions as ranks, or v
            times as many if the schedule has v partitions on each rank.
        mesh: A `DeviceMesh` of one dimension, such as `mesh["pp"]`. The ranks of the mesh hold the
            partitions. By default, all ranks hold partitions.
        device: This rank's device; `"cuda"` is the current GPU. If every rank has a different GPU,
            NCCL transfers tensors between GPUs. Otherwise tensors go through host memory.
        chunks: See `GPipe`.
        checkpoint: See `GPipe`.
        deferred_batch_norm: See `GPipe`.
        init: See `GPipe`. It is called for the layers of this rank only.
        schedule: See `GPipe`. Rank 0 has the first stage, and the last rank has the last stage.
            With the schedule ZBVZeroBubble, rank 0 has both.
        timeout: How many seconds a problem may last before all ranks stop with an error. The
            problems are: a rank sends no sign of life; a task neither ends nor uses the CPU; all
            ranks wait for each other. With `None`, there is no limit. The timeout has to be longer
            than the transfer of the largest message.
        silence: The old name of `timeout`, which will be removed.

    Attributes:
        balance, chunks, checkpoint, timeout: The values of these arguments.
        logs, observer, plan: See `GPipe`. Only the rank of the last stage has logs.
        schedule: See `GPipe`.
        partitions: The partitions of this rank.
        partition: The only partition of this rank, an `nn.Sequential`.
        rank: The index of this rank among the ranks of the pipeline.

    Raises:
        RuntimeError: If there is no process group, or if partitions share a `torch.Generator`.
        TypeError: See `GPipe`.
        ValueError: As for `GPipe`, and if there are too few or too many partitions for the ranks.
    """

    _traced_instead = (
        "load the states of all ranks into the layers without a pipeline, and trace or export those"
    )

    def __init__(  # noqa: PLR0913 - each is an option of the user's
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
        check_group(mesh)
        if not isinstance(device, int | str | torch.device):
            raise TypeError(f"device must be this rank's device, but got {device!r}")
        (device,) = choose_devices([device], 1)
        group = dist.group.WORLD if mesh is None else mesh.get_group()
        self._ranks = dist.get_process_group_ranks(group)
        self.rank = self._ranks.index(dist.get_rank())
        n = len(self._ranks)
        stages = len(self.balance)
        _, devices, _, placement = arranged(schedule, stages, n)
        if devices != n:
            raise ValueError(
                f"the balance {self.balance} has {stages} partitions, but there are {n} ranks; "
                f"give each rank a number of layers in the balance, or start {devices} processes "
                "(torchrun --nproc-per-node)"
            )
        check_apart([own_generators(modules_of(partition)) for partition in self._partitions])
        self._crossings = skip_layout(self._partitions)
        self._checksum = checksum_of_parameters(module)
        here = [device if rank == self.rank else None for rank in placement]
        self._tied = TiedParameters(self._partitions, placement, self.rank)
        self._hold(here, init)
        warn_without_parameters(module, self.partitions, self.rank)
        own = {*self.parameters()}
        self._elsewhere.update({p: name for name, p in module.named_parameters() if p not in own})
        with self._together("the start"):  # a rank can fail before its first mini-batch
            self._tied.begin_equal(self._connected())

    def _build(self) -> None:
        super()._build()
        made = self._schedule
        arrangement = arranged(made, len(self.balance), len(self._ranks))
        self._programs_engine = ProgramsEngine(self._stages, arrangement)
        if isinstance(made, str):
            self._schedule_name = made.lower()
        else:
            checksum = crc32(repr(made).encode())
            self._schedule_name = f"{made.name}, {checksum:x}"
        # The names of the parameters of other ranks' layers, as long as this process has them.
        self._elsewhere = WeakTensorKeyDictionary()
        self._connections: Connections | None = None
        # Whether the guard `OtherRanksParameters` has searched the graphs of this rank's stages.
        self._searched = False
        self._serial = 0  # the number of the latest mini-batch
        self._warned = False  # whether this rank has warned that ranks have different samples

    def _layout(self) -> list[Crossing]:
        return self._crossings

    def copies(self) -> dict[nn.Parameter, str]:
        """Map this rank's copies of other ranks' parameters to the names of the originals."""
        return self._tied.copies()

    @property
    def silence(self) -> float | None:
        """The old name of `timeout`."""
        _warn_of_silence(2)
        return self.timeout

    @silence.setter
    def silence(self, timeout: float | None) -> None:
        """Set `timeout` under its old name."""
        # The level is 3, because the caller's assignment calls `nn.Module.__setattr__` first.
        _warn_of_silence(3)
        self.timeout = timeout

    @property
    def partition(self) -> nn.Sequential:
        """This rank's only partition.

        Raises:
            ValueError: If the rank has several partitions.
        """
        if len(self._partitions) > 1:
            raise ValueError(
                f"rank {self.rank} holds {len(self._partitions)} partitions: see model.partitions"
            )
        return cast(nn.Sequential, self._partitions[0])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a mini-batch through the pipeline; only the first stage's rank uses its input.

        Returns:
            On the rank of the last stage, the output. On other ranks, a scalar tensor that is
            zero; its `backward()` runs this rank's part of the backward. If the output does not
            require grad, other ranks get `None`.

        Raises:
            RankFailed: If another rank has failed.
        """
        return run_uncompiled(self._traced_instead, self._run, args, kwargs, None)

    def _run_for_loss(self, args: tuple[Any, ...], kwargs: dict[str, Any], request: Any) -> Tensor:
        return cast(Tensor, self._run(args, kwargs, request))

    def loss(self, criterion: Callable[[Any, Any], Tensor], input: Any, target: Any) -> Tensor:
        """Return the loss `criterion(output, target)`, the same number on every rank.

        All ranks have to call `backward()` on the loss.

        Args:
            criterion: A function of the mini-batch's output and the target. Only the rank of the
                last stage calls it.
            input: The mini-batch, used on the rank of the first stage.
            target: The target of the mini-batch, used on the rank of the last stage.

        Raises:
            TypeError: If `criterion` does not return a scalar.
            RankFailed: If another rank has failed.
        """
        request = LossRequest(criterion, target)
        return cast(Tensor, run_uncompiled(self._traced_instead, self._hooked, input, request))

    @contextmanager
    def _together(self, doing: str, **alike: float) -> Iterator[Callable[[Tensor], list[Tensor]]]:
        connections = self._connected()
        with connections.call(self._serial, doing):
            yield partial(connections.exchange, doing, alike=alike)

    def __dir__(self) -> list[str]:
        # `torch.jit.trace` reads every attribute that `dir()` lists. Leave out the property below,
        # because reading it raises an error.
        names: list[str] = super().__dir__()  # type: ignore[no-untyped-call]
        names.remove("_ddp_params_and_buffers_to_ignore")
        return names

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        raise TypeError(
            "DistributedDataParallel of a pipeline would not notice its step() and loss(); use "
            "replicate(model, device_mesh=...) or fully_shard(model.partition, mesh=...)"
        )

    def close(self) -> None:
        """Close the connections to other ranks, and reset the number of mini-batches to zero.

        When a process ends, its connections are closed without this call. After a failure, all
        ranks have to call this method, because some ranks may have begun one more mini-batch than
        other ranks. The next call of the pipeline connects again.
        """
        if self._connections is not None:
            self._connections.close()
        self._serial = 0
        self._tied.begin_again()

    def _connected(self) -> Connections:
        """Return the open connections, and make new ones if there are none."""
        if self._connections is None or self._connections.ended:
            check_connectable(self.timeout, self._ranks[self.rank])
            self._connections = Connections(self._ranks, self.rank, self.timeout)
            # The connections' threads do not refer to the pipeline. So Python can garbage-collect
            # the pipeline while connections are open, and this finalizer then closes them.
            weakref.finalize(self, _close, weakref.ref(self._connections)).atexit = False
        if self._connections.timeout != self.timeout:
            raise RuntimeError(
                f"timeout was changed from {self._connections.timeout} to {self.timeout} while "
                "ranks are connected; call close() on all ranks before you change it"
            )
        return self._connections

    def _run(self, args: Any, kwargs: Any, request: Request) -> Any:
        connections = self._connected()
        in_backward = backward_id() != -1
        if connections.liveness.activity.within and not in_backward:
            raise RuntimeError(
                "a layer, a hook or the criterion calls the pipeline while it runs, but a call "
                "needs all ranks at the same time; call the pipeline after the step, on all ranks"
            )
        self._serial += 1
        with connections.call(self._serial, "the call"):
            if in_backward:
                raise RuntimeError(WITHIN_BACKWARD)
            if sharded([self]):
                raise TypeError(SHARDED)
            check_request(request, len(self._ranks))
            self._check()
            run = partial(self._run_batch, connections, args, kwargs, request)
            result = self._mini_batch(run, self.chunks)
        is_last = self.rank == self._programs_engine.arrangement.placement[-1]
        if request is None and not is_last and not result.requires_grad:
            return None
        return result

    def _run_batch(self, connections: Connections, args: Any, kwargs: Any, request: Request) -> Any:
        stage = self._stages[0]
        micro_batches, copied = ([], None) if stage.index else self._scattered(args, kwargs)
        placement = self._programs_engine.arrangement.placement
        late = self._schedule_name == "gpipe"
        connections.meet(stage.device, placement, self._crossings, self._tied.peers, late=late)
        call, target = "forward()", None
        if request is not None:
            call = "step()" if isinstance(request, StepRequest) else "loss()"
            target = request.target
        settings = settings_of(self, self._schedule_name, self.timeout, self._checksum, call)
        given = checksums(self._serial, (args, kwargs), target)
        batch = RankBatch(connections, settings, micro_batches, given, owner=self)
        if batch.last and not self._warned:
            self._warned = warn_if_unlike(given, batch.first_checksums, self.rank, placement[0])
        if isinstance(request, StepRequest):
            result = run_step(batch, micro_batches, batch.sizes, request, self._for_criterion)
        else:
            result = batch.run_call(request)
        if copied is not None:
            copied.synchronize()
        return result

    def _scattered(self, args: Any, kwargs: Any) -> Divided:
        if self._signature is None:
            input = taken_apart(the_input(args, kwargs))
        else:
            input = self._signature.input_of(args, kwargs)
        check(input)
        return divided(input, self.chunks, self._stages[0], self._signature)


def _close(reference: weakref.ref[Connections]) -> None:
    """Close connections in a new thread, unless the connections are already garbage-collected.

    Python can garbage-collect a pipeline in any thread. This thread must not wait for other ranks.
    """
    connections = reference()
    if connections is not None:
        threading.Thread(target=connections.close, name="gpipe-closes", daemon=True).start()


def _warn_of_silence(level: int) -> None:
    line = "DistributedGPipe: silence is now called timeout, and the old name will be removed"
    warnings.warn(line, DeprecationWarning, stacklevel=level + 1)
