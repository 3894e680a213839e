"""Define `GPipe`, which trains a sequence of layers as a pipeline over several devices."""

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from torchgpipe.caught import shortened
from torchgpipe.engine.arrangement import arranged
from torchgpipe.engine.batch import Batch, ProgramsEngine
from torchgpipe.engine.graph import GraphEngine
from torchgpipe.layers.batches import check_calls, divided, joined, the_input
from torchgpipe.layers.checks import shared_buffers
from torchgpipe.layers.devices import choose_devices
from torchgpipe.layers.split import Init
from torchgpipe.partitioned import Partitioned
from torchgpipe.schedules import Schedule
from torchgpipe.skip.layout import Crossing, skip_layout
from torchgpipe.step.losses import run_step
from torchgpipe.step.request import StepRequest, check_criterion, scalar
from torchgpipe.step.targets import whole
from torchgpipe.tensors.checkpoint import Mode
from torchgpipe.tensors.microbatch import Input, TensorOrTensors, check
from torchgpipe.trace.parts import taken_apart
from torchgpipe.uncompiled import is_traced, run_uncompiled

Device = int | str | torch.device
EngineName = Literal["auto", "graph", "workers"]


class GPipe(Partitioned):
    """Train an `nn.Sequential` by pipeline parallelism (Huang et al., arXiv:1811.06965).

        model = GPipe(model, balance=[2, 3], devices=["cuda:0", "cuda:1"], chunks=8)
        loss(model(input), target).backward()

    The layers are split into partitions, each on a device. A mini-batch is split into
    micro-batches, and the partitions work on different micro-batches at the same time. The output
    and the gradients are the same as if the layers ran on one micro-batch after the other, without
    a pipeline.

    Args:
        module: The layers. Their parameters are moved to the devices.
        balance: The number of layers of each partition; see `torchgpipe.balance`.
        devices: The device of each partition. If partitions share a device, repeat it in the list.
            But if the schedule itself puts several partitions on each device, list each device
            only once. The default is all GPUs, or the CPU if there is none.
        chunks: The number of micro-batches m that a mini-batch is split into. Dimension 0 of every
            input tensor is split into pieces of ⌈batch / m⌉.
        checkpoint: Which micro-batches are checkpointed: their tasks keep only the inputs, and run
            the layers again in backward. `"always"` checkpoints all micro-batches, `"except_last"`
            all but the last one, and `"never"` none.
        deferred_batch_norm: Whether batch norms update their running statistics once for each
            mini-batch, instead of once for each micro-batch.
        engine: `"workers"` runs each partition in its own thread, on the CPU only. `"graph"` runs
            every task from the calling thread. `"auto"` chooses `"workers"` if there are several
            partitions, all on the CPU, and else `"graph"`. `"graph"` is faster if a task on the
            CPU takes much less than a millisecond.
        dependency: Whether to force a fixed order of the tasks in backward on GPUs. On other
            devices, the order is always fixed.
        copy_streams: Whether copies between GPUs use separate streams.
        portals: Whether a skip is sent directly to the partition that pops it, and not through the
            partitions in between.
        init: Called as `init(k, layer)` for each layer k, to fill the layer. The random numbers
            that it draws depend only on k and on the default generator's seed. `init` is required
            if layers are on device `meta`.
        schedule: The order of tasks: `"GPipe"`, `"1F1B"`, `"Interleaved1F1B"`, `"ZBH1"`, `"ZBH2"`,
            `"ZBVZeroBubble"`, or a `torchgpipe.schedules.Schedule`. If the schedule has v stages on
            each device, n devices need a balance of n·v partitions. Only `step` runs all tasks in
            the schedule's order. `model(x)` first runs all forwards, and the backward of its output
            runs the other tasks.
        silence: Has no effect; deprecated.

    Attributes:
        balance: The number of layers of each partition.
        devices: The devices. The schedule's device number d stands for `devices[d]`.
        chunks: The number of micro-batches.
        checkpoint: Which micro-batches are checkpointed.
        partitions: The partitions, each an `nn.Sequential`.
        schedule: The schedule in use. It has a `name`, a `placement` (the device number of each
            stage), and `report()`, which returns a line for each stage.
        observer: A function that is called with each task (`torchgpipe.tensors.observe.Task`), and
            returns a context manager in which the task runs. It is `None` by default.
        logs: What the criterion returned beside the loss in the last `step` or `evaluate`, a list
            with an item for each micro-batch. It is empty if the criterion returned only a loss.
        plan: The `torchgpipe.plan.Plan` with which `torchgpipe.pipeline` made the pipeline, or
            `None`.

    Raises:
        TypeError: `module` is not an `nn.Sequential`, its skips do not match, or `devices` is not a
            list.
        ValueError: `chunks`, `checkpoint`, `engine` or `balance` is out of range; a layer occurs
            twice; or a layer is on `meta`, and there is no `init`, or `init` leaves out a buffer
            that is not persistent.
        IndexError: There are fewer devices than the partitions need.
    """

    devices: list[torch.device]
    _engine: GraphEngine | ProgramsEngine

    def __init__(  # noqa: PLR0913 - each is an option of the user's
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        devices: Iterable[Device] | None = None,
        chunks: int = 1,
        checkpoint: Mode = "except_last",
        deferred_batch_norm: bool = False,
        engine: EngineName = "auto",
        dependency: bool = True,
        copy_streams: bool = True,
        portals: bool = True,
        init: Init | None = None,
        schedule: str | Schedule = "GPipe",
        silence: float | None = None,
    ) -> None:
        super().__init__(
            module,
            balance,
            chunks=chunks,
            checkpoint=checkpoint,
            deferred_batch_norm=deferred_batch_norm,
            schedule=schedule,
        )
        if silence is not None:
            warnings.warn(
                "GPipe(silence=…) does nothing any more, and will go",
                DeprecationWarning,
                stacklevel=2,
            )
        self._traced_instead = "call model.eval() first, or trace or export its layers, model[:]"
        if self._signature is not None:
            self._traced_instead = "trace or export the module itself, which has its parameters"
        stages = len(self.balance)
        named = (
            [*devices]
            if isinstance(devices, Iterable) and not isinstance(devices, str)
            else devices
        )
        arrangement = arranged(schedule, stages, len(named) if isinstance(named, list) else None)
        self.devices = choose_devices(named, arrangement.n if stages else 0)
        chosen = [self.devices[d] for d in arrangement.placement]
        if engine not in get_args(EngineName):
            allowed = ", ".join(map(repr, get_args(EngineName)))
            raise ValueError(f"engine must be one of {allowed}, but got {shortened(engine)}")
        if engine == "workers" and any(device.type != "cpu" for device in chosen):
            raise ValueError(
                f"engine={engine!r} is for CPU devices, but got {sorted({str(d) for d in chosen})}"
            )
        self._engine_name: EngineName = engine
        self._dependency, self._copy_streams = dependency, copy_streams
        self._portals = portals
        self._hold(chosen, init)

    def _build(self) -> None:
        super()._build()
        engine = self._engine_name
        on_cpu = [stage.device.type == "cpu" for stage in self._stages]
        threads = engine == "workers" or (engine == "auto" and len(on_cpu) > 1 and all(on_cpu))
        arrangement = arranged(self._schedule, len(self._stages), len(self.devices))
        streams = self._copy_streams
        self._engine = self._programs_engine = ProgramsEngine(
            self._stages, arrangement, threads=threads, copy_streams=streams
        )
        # The finalizer refers to the worker threads only. If it referred to the engine, which has
        # the layers, a layer that refers to this pipeline would keep the pipeline alive forever.
        weakref.finalize(self, self._programs_engine.workers.close)
        if not threads:
            self._engine = GraphEngine(
                self._stages, arrangement, dependency=self._dependency, copy_streams=streams
            )

    def _layout(self) -> list[Crossing]:
        self._shared_buffers = shared_buffers(self.partitions, self.partitions)
        return skip_layout(self.partitions, portals=self._portals)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a mini-batch through the pipeline.

        Args:
            *args: One input: a tensor, or a tuple of tensors with the same batch size (dimension
                0), on any device; or a mapping or dataclass of such tensors, which the first layer
                gets; or `MicroBatches`, a list of such inputs, which are not split. If the layers
                come from `torchgpipe.sequential`, which traces a module: the arguments of this
                module. If a tensor is in pinned memory, it may be overwritten as soon as this
                method has returned.
            **kwargs: The same by name: `input=`, or the names of the module's arguments.

        Returns:
            The concatenated outputs of the micro-batches, on the device of the last partition. If
            the last layer or the traced module returns a mapping or a dataclass, so does this
            method.

        Raises:
            TypeError: The input has another type, or the output cannot be concatenated.
            ValueError: The input's tensors have no batch dimension, or different batch sizes.
        """
        # In evaluation mode, the layers give the same output without micro-batches.
        plain = not self.training and self._signature is None and len(set(self.devices)) == 1
        if plain and is_traced():
            return self[:](*args, **kwargs)
        return run_uncompiled(self._traced_instead, self._forward, args, kwargs)

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        input = self._input_of(args, kwargs)
        micro_batches, copied = self._begun(input)
        if not self._stages:
            return input
        run = partial(self._engine.run, micro_batches, self.checkpoint, self.observer)
        output = joined(self._mini_batch(run, len(micro_batches)))
        if copied is not None:
            copied.synchronize()
        return self._structured(output)

    def _input_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._signature is None:
            return the_input(args, kwargs)
        return self._signature.input_of(args, kwargs)

    def _run_for_loss(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], request: StepRequest
    ) -> torch.Tensor:
        # Check the criterion first: a caller who forgets it passes the input in its place.
        check_criterion(request.criterion, request.call)
        input = self._input_of(args, kwargs)
        micro_batches, copied = self._begun(input)
        if not self._stages:
            raise ValueError("there are no layers to train")
        sizes = self._sizes(micro_batches)

        def run() -> torch.Tensor:
            batch = Batch(self._programs_engine, len(micro_batches), self.checkpoint, self.observer)
            return run_step(batch, micro_batches, sizes, request, self._for_criterion)

        loss = self._mini_batch(run, len(micro_batches))
        if copied is not None:
            copied.synchronize()
        return loss

    def _begun(self, input: Input) -> tuple[list[TensorOrTensors], torch.Event | None]:
        """Check the input and the settings; return the micro-batches of the input.

        Also return an event that occurs when all copies of the input from pinned memory have ended.
        The event is `None` if nothing is copied from pinned memory.
        """
        input = taken_apart(input)
        check(input)
        self._check()
        if not self._stages:
            return [], None
        micro_batches, copied = divided(input, self.chunks, self._stages[0], self._signature)
        if self._signature is not None and self._engine is self._programs_engine:
            check_calls(micro_batches, self._stages[0].partition)
        return micro_batches, copied

    def loss(
        self, criterion: Callable[[Any, Any], torch.Tensor], input: Any, target: Any
    ) -> torch.Tensor:
        """Run a mini-batch through the pipeline, and return `criterion(output, target)`.

        This method runs only the forwards. Call `backward()` on the returned loss to run the
        backwards. (The method `step` runs forwards and backwards.) `DistributedGPipe` has the same
        method.

        Args:
            criterion: A function of the output of the whole mini-batch and the target.
            input: The input, as for `forward`. If `torchgpipe.sequential` has made the layers, give
                all arguments of the module here: a tensor, a tuple of arguments, or a dictionary
                from names to arguments, like the sample that `sequential` got.
            target: The second argument of the criterion.

        Raises:
            TypeError: If `criterion` is not a function, or does not return a tensor.
        """
        check_criterion(criterion, "loss")
        target = whole(target)
        args, kwargs = self._arguments(input)
        loss = criterion(self(*args, **kwargs), target)
        return loss if isinstance(loss, Tensor) else scalar(loss, "loss")

    def __len__(self) -> int:
        return sum(self.balance)

    def __iter__(self) -> Iterator[nn.Module]:
        yield from self[:]

    def __getitem__(self, index: int | slice) -> Any:
        layers = nn.Sequential()
        for stage in self._stages:
            layers._modules.update(stage.partition.named_children())
        return layers[index]
