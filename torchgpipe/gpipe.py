"""`GPipe`: a sequence of layers that trains as a pipeline."""

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
from torch import nn

from torchgpipe.engine.arrangement import arranged
from torchgpipe.engine.batch import Batch, WorkersEngine
from torchgpipe.engine.graph import GraphEngine
from torchgpipe.layers.checks import shared_buffers
from torchgpipe.layers.devices import choose_devices
from torchgpipe.layers.split import Init
from torchgpipe.partitioned import Partitioned
from torchgpipe.schedules import Schedule
from torchgpipe.skip.layout import Crossing, skip_layout
from torchgpipe.step.losses import run_step
from torchgpipe.step.request import StepRequest
from torchgpipe.tensors.checkpoint import Mode
from torchgpipe.tensors.microbatch import TensorOrTensors, check, gather

Device = int | str | torch.device
EngineName = Literal["auto", "graph", "workers"]


class GPipe(Partitioned):
    """Train an `nn.Sequential` by pipeline parallelism (Huang et al., arXiv:1811.06965).

        model = GPipe(model, balance=[2, 3], devices=["cuda:0", "cuda:1"], chunks=8)
        loss(model(input), target).backward()

    The layers are split into partitions, each on a device. A mini-batch is split into
    micro-batches, which go through the partitions at once. Output and gradients are those of the
    layers run on each micro-batch in turn.

    Args:
        module: The layers. Their parameters are moved to the devices.
        balance: How many layers each partition has; see `torchgpipe.balance`.
        devices: A device for each partition, or for several if the schedule says so; by default all
            CUDA devices, or the CPU where there is none. A device may be named several times.
        chunks: How many micro-batches a mini-batch is split into, m. Dimension 0 of every input
            tensor is split by ⌈batch / m⌉.
        checkpoint: Which micro-batches keep only the inputs of their tasks, and compute the rest
            once more in backward: `"always"` all, `"except_last"` all but the last, `"never"` none.
        deferred_batch_norm: Let batch norm's running statistics follow mini-batches instead of
            micro-batches.
        engine: `"workers"` runs each partition in a thread of its own, on the CPU only. `"graph"`
            issues every task from the calling thread. `"auto"` takes workers where several CPU
            partitions compute, and else the graph. Where CPU tasks take less than a fraction of a
            millisecond, the graph is quicker.
        dependency: Tie micro-batches so that backward has one order. This has an effect on CUDA;
            elsewhere backward has one order anyway.
        copy_streams: Copy between CUDA devices on streams of their own.
        portals: Send skips straight to the partition that pops them, not through those in between.
        init: Called as `init(k, layer)` for each layer k, with random numbers that depend on k and
            the default generator's seed alone. Layers on device `meta` need it.
        schedule: The order of tasks: `"GPipe"`, `"1F1B"`, `"Interleaved1F1B"`, `"ZBH1"`, `"ZBH2"`,
            `"ZBVZeroBubble"`, or a `torchgpipe.schedules.Schedule`. If the schedule has v stages on
            a device, n devices take a balance of n·v partitions. `step` does what the schedule
            says. `model(x)` does its forwards, and a backward, after the last forward, the rest.
        silence: Without effect; it will go.

    Attributes:
        balance: As above.
        devices: The device of each place in the schedule.
        chunks: As above.
        checkpoint: As above.
        partitions: The partitions, each an `nn.Sequential`.
        schedule: The schedule in use, with its `name`, `placement` and `report()`, a line for each
            stage.
        observer: Called with each `torchgpipe.tensors.observe.Task`, returns a context to run it
            in; `None` by default.

    Raises:
        TypeError: `module` is no `nn.Sequential`, its skips do not match, or `devices` is no list.
        ValueError: `chunks`, `checkpoint`, `engine` or `balance` is out of range; a layer, or a
            parameter on two devices, occurs twice; a layer is on `meta`, and there is no `init`.
        IndexError: There are fewer devices than the partitions need.
    """

    devices: list[torch.device]
    _engine: GraphEngine | WorkersEngine
    _traced_instead = "trace or export its layers, model[:]"

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
        options: dict[str, Any] = {
            "checkpoint": checkpoint,
            "deferred_batch_norm": deferred_batch_norm,
        }
        super().__init__(module, balance, chunks=chunks, schedule=schedule, **options)
        if silence is not None:
            warnings.warn(
                "GPipe(silence=…) does nothing any more, and will go",
                DeprecationWarning,
                stacklevel=2,
            )
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
            raise ValueError(f"engine must be one of {allowed}, but got {engine!r}")
        if engine == "workers" and any(device.type != "cpu" for device in chosen):
            raise ValueError(
                f"engine={engine!r} is for CPU devices, but got {sorted({str(d) for d in chosen})}"
            )
        self._engine_name: EngineName = engine
        self._of_graph_engine = {"dependency": dependency, "copy_streams": copy_streams}
        self._portals = portals
        self._hold(chosen, chosen, init)

    def _build(self) -> None:
        super()._build()
        engine = self._engine_name
        on_cpu = [stage.device.type == "cpu" for stage in self._stages]
        threads = engine == "workers" or (engine == "auto" and len(on_cpu) > 1 and all(on_cpu))
        arrangement = arranged(self._schedule, len(self._stages), len(self.devices))
        self._engine = self._steps = WorkersEngine(self._stages, arrangement, threads=threads)
        # Not the engine's method: the engine holds the layers, and if these hold this module, it
        # would live forever.
        weakref.finalize(self, self._steps.workers.close)
        if not threads:
            self._engine = GraphEngine(self._stages, arrangement, **self._of_graph_engine)

    def _layout(self) -> list[Crossing]:
        self._shared_buffers = shared_buffers(self.partitions, self.partitions)
        return skip_layout(self.partitions, portals=self._portals)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a mini-batch through the pipeline, as `forward` says.

        The pipeline of a traced module is called like the module (`torchgpipe.sequential`).
        """
        if self._signature is not None:
            args, kwargs = (self._signature.flat(args, kwargs),), {}
        return self._shown(super().__call__(*args, **kwargs))

    def forward(self, input: TensorOrTensors) -> TensorOrTensors:
        """Run a mini-batch through the pipeline.

        Args:
            input: A tensor, or a tuple of tensors of one batch size (dimension 0), on any device.

        Returns:
            What the layers return, on the last device, with the micro-batches' outputs
            concatenated.

        Raises:
            TypeError: `input`, or the output of a partition, is something else.
            ValueError: The tensors of `input` have no batch dimension, or disagree on it.
        """
        return cast(TensorOrTensors, self._uncompiled(self._forward, input))

    def _forward(self, input: TensorOrTensors) -> TensorOrTensors:
        micro_batches = self._begun(input)
        if not self._stages:
            return input
        run = partial(self._engine.run, micro_batches, self.checkpoint, self.observer)
        return gather(self._mini_batch(run))

    def _carry_out(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], request: StepRequest
    ) -> torch.Tensor:
        input = args[0] if self._signature is None else self._signature.flat(args, kwargs)
        micro_batches = self._begun(input)
        if not self._stages:
            raise ValueError("there are no layers to train")
        sizes = self._sizes(micro_batches)

        def run() -> torch.Tensor:
            batch = Batch(self._steps, len(micro_batches), self.checkpoint, self.observer)
            return run_step(batch, micro_batches, sizes, request, self._seen)

        return self._mini_batch(run)

    def _begun(self, input: TensorOrTensors) -> list[TensorOrTensors]:
        """Check an input and this pipeline; return the micro-batches."""
        check(input)
        self._check()
        return self._micro_batches(input) if self._stages else []

    def loss(
        self, criterion: Callable[[Any, Any], torch.Tensor], input: Any, target: Any
    ) -> torch.Tensor:
        """Return `criterion(output, target)` of a mini-batch.

        Its backward begins when all forwards have ended. `DistributedGPipe` has the same method.

        Args:
            criterion: Called with the output of the mini-batch and the target.
            input: As for `forward`; of a traced module, as its sample was: a tensor, a tuple of
                arguments, or a dictionary of them.
            target: Handed to the criterion.
        """
        args, kwargs = self._arguments(input)
        return criterion(self(*args, **kwargs), target)

    def __len__(self) -> int:
        return sum(self.balance)

    def __iter__(self) -> Iterator[nn.Module]:
        yield from self[:]

    def __getitem__(self, index: int | slice) -> Any:
        layers = nn.Sequential()
        for stage in self._stages:
            layers._modules.update(stage.partition.named_children())
        return layers[index]
