"""`GPipe`: a sequence of layers that trains as a pipeline."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from torchgpipe.batchnorm import DeferredBatchNorm, commit
from torchgpipe.checkpoint import MODES, Mode
from torchgpipe.contents import begins_in_place
from torchgpipe.engines import Engine, EngineName, check_engine, make_engine
from torchgpipe.microbatch import TensorOrTensors, check, gather, mapped, scatter
from torchgpipe.norm import clip_grad_norm_
from torchgpipe.observe import Observer
from torchgpipe.partition import check_module, check_parameters, choose_devices, split, translate_old_state
from torchgpipe.randomness import check_apart
from torchgpipe.skip.layout import skip_layout
from torchgpipe.skip.verify import verify_skippables
from torchgpipe.stage import Stage
from torchgpipe.trace.layer import Layers, keep_names
from torchgpipe.trace.signature import Signature
from torchgpipe.workers import WorkersEngine

Device = int | str | torch.device


class GPipe(nn.Module):
    """Train an `nn.Sequential` by pipeline parallelism (Huang et al., arXiv:1811.06965).

        model = GPipe(model, balance=[2, 3], devices=["cuda:0", "cuda:1"], chunks=8)
        loss(model(input), target).backward()

    The layers are split into partitions, each on a device; a mini-batch is split into micro-batches, which go
    through the partitions at once. Output and gradients are those of the layers run on each micro-batch in turn.

    Args:
        module: the layers. Their parameters are moved to the devices.
        balance: layers per partition; see `torchgpipe.balance`.
        devices: one per partition; by default all CUDA devices, or the CPU where there is none. One device may
            hold several partitions.
        chunks: micro-batches per mini-batch, m. Dimension 0 of every input tensor is split by ⌈batch / m⌉.
        checkpoint: keep only the inputs of tasks, and recompute the rest in backward, for `"always"` all,
            `"except_last"` all but the last, or `"never"` any of the micro-batches.
        deferred_batch_norm: let batch norm's running statistics follow mini-batches instead of micro-batches.
        engine: `"workers"` runs each partition in a thread of its own, on the CPU only; `"graph"` issues every task
            from the calling thread. `"auto"` takes workers where several CPU partitions compute, and else the graph.
            Where CPU tasks take less than a fraction of a millisecond, the graph is quicker.
        dependency: tie micro-batches so that backward has one order (on CUDA; elsewhere it has only one).
        copy_streams: copy between CUDA devices on streams of their own.
        portals: send skips straight to the partition that pops them, not through those in between.

    Attributes:
        balance, devices, chunks, checkpoint, partitions: as above.
        observer: called with each `torchgpipe.observe.Task`, returns a context to run it in; `None` by default.

    Raises:
        TypeError: `module` is no `nn.Sequential`, its skips do not match, or `devices` is no list.
        ValueError: `chunks`, `checkpoint`, `engine` or `balance` is out of range; a layer, or a parameter on two
            devices, occurs twice.
        IndexError: there are fewer devices than partitions.
    """

    balance: list[int]
    devices: list[torch.device]
    chunks: int
    checkpoint: Mode
    observer: Observer | None
    _stages: list[Stage]
    _engine: Engine
    _shared_buffers: list[torch.Tensor]

    def __init__(
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
    ) -> None:
        super().__init__()
        check_module(module)
        check_settings(chunks, checkpoint)
        verify_skippables(module)
        if deferred_batch_norm:
            module = DeferredBatchNorm.convert_deferred_batch_norm(module, None)

        partitions = split(module, balance)
        self.balance = list(map(len, partitions))
        self.devices = chosen = choose_devices(devices, len(partitions))
        check_parameters(partitions, chosen)
        for partition, device in zip(partitions, chosen, strict=True):
            partition.to(device)
        self.chunks = chunks
        self.checkpoint = checkpoint
        self.observer = None
        self.training = module.training
        check_engine(engine, chosen)
        self._switches = (engine, dependency, copy_streams, portals)
        self._signature = module.signature if isinstance(module, Layers) else None
        # The layers are this module's own children, by their own names: its state is the wrapped module's.
        self.__dict__["_partitions"] = nn.ModuleList(partitions)
        for partition in partitions:
            self._modules.update(partition._modules)
        self.register_load_state_dict_pre_hook(translate_old_state)  # type: ignore[no-untyped-call]
        keep_names(self)
        self._build()

    def _build(self) -> None:
        """Make what cannot be copied or pickled: streams, threads, and what refers to them."""
        engine, dependency, copy_streams, portals = self._switches
        placed = zip(self.partitions, self.devices, strict=True)
        self.__dict__["_stages"] = stages = [
            Stage(j, partition, device) for j, (partition, device) in enumerate(placed)
        ]
        self.__dict__["_engine"] = made = make_engine(engine, stages, dependency=dependency, copy_streams=copy_streams)
        self._look(portals)
        if isinstance(made, WorkersEngine):
            # Only of the workers: the engine holds the layers, which may hold this module, so it would live forever.
            weakref.finalize(self, made.workers.close)

    def _look(self, portals: bool) -> None:
        """Find out what the partitions consist of now: a layer may have been replaced inside of another."""
        if any([stage.look() for stage in self._stages]):
            self.__dict__["_shared_buffers"] = _shared_buffers(self._stages)
            crossings = skip_layout(self.partitions, portals=portals)
            for stage in self._stages:
                stage.connect(crossings)

    @property
    def partitions(self) -> nn.ModuleList:
        """The partitions, each an `nn.Sequential` of consecutive layers on its device."""
        partitions: nn.ModuleList = self.__dict__["_partitions"]
        return partitions

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a mini-batch through the pipeline, as `forward` says; that of a traced module is called like the module.

        See `torchgpipe.sequential`.
        """
        if self._signature is None:
            return super().__call__(*args, **kwargs)
        return self._signature.structured(super().__call__(self._signature.flat(args, kwargs)))

    def forward(self, input: TensorOrTensors) -> TensorOrTensors:
        """Run a mini-batch through the pipeline.

        Args:
            input: a tensor, or a tuple of tensors of one batch size (dimension 0), on any device.

        Returns:
            What the layers return, on the last device, with the micro-batches' outputs concatenated.

        Raises:
            TypeError: `input`, or the output of a partition, is something else.
            ValueError: the tensors of `input` have no batch dimension, or disagree on it.
        """
        if torch.compiler.is_dynamo_compiling():
            # torch.compile would follow the scheduler, and recompile for each task; layers may be compiled instead.
            disabled: Callable[[TensorOrTensors], TensorOrTensors] = torch.compiler.disable(self._run)
            return disabled(input)
        return self._run(input)

    def _run(self, input: TensorOrTensors) -> TensorOrTensors:
        check(input)
        check_settings(self.chunks, self.checkpoint)
        if not self._stages:
            return input
        partitions = [stage.partition for stage in self._stages]
        layers = [item for partition in partitions for item in partition._modules.items()]
        if partitions != [*self.partitions] or any(self._modules.get(name) is not layer for name, layer in layers):
            raise RuntimeError(
                "a layer or partition was replaced after the pipeline was made; change the layers first, then wrap "
                "them in a GPipe (what is inside of a layer may be replaced at any time between steps)"
            )
        self._look(self._switches[-1])
        check_apart([stage.generators for stage in self._stages])
        micro_batches = micro_batches_of(input, self._stages[0], self.chunks, self._signature)
        norms = [norm for stage in self._stages for norm in stage.deferred_norms]
        shared = [x._version for x in self._shared_buffers]
        grad = torch.is_grad_enabled()
        try:
            outputs = self._engine.run(micro_batches, self.checkpoint, self.observer)
            if [x._version for x in self._shared_buffers] != shared:
                raise RuntimeError(
                    "two partitions have layers that change the same buffer (such as one batch norm in both), and not "
                    "in the order in which the layers would; give each its own layer, or keep it in evaluation mode"
                )
        except BaseException:
            torch.set_grad_enabled(grad)  # Ctrl-C can come before the exit of a context is set up
            for norm in norms:
                norm.discard()
            raise
        commit(norms)
        return gather(outputs)

    def loss(self, criterion: Callable[[Any, Any], torch.Tensor], input: Any, target: Any) -> torch.Tensor:
        """Return `criterion(output, target)` of a mini-batch: the step that `DistributedGPipe` takes in the same words.

        The input of a traced module may be a dictionary of arguments.
        """
        return criterion(self(**input) if isinstance(input, dict) else self(input), target)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients of all partitions together, as `torch.nn.utils.clip_grad_norm_`; return their norm."""
        return clip_grad_norm_(self.parameters(), max_norm, norm_type)

    def train(self, mode: bool = True) -> GPipe:
        """Set training or evaluation mode, of the partitions too."""
        super().train(mode)
        for partition in self.partitions:
            partition.training = mode
        return self

    def __len__(self) -> int:
        return sum(self.balance)

    def __iter__(self) -> Iterator[nn.Module]:
        yield from self[:]

    def __getitem__(self, index: int | slice) -> Any:
        layers = nn.Sequential()
        for stage in self._stages:
            layers._modules.update(stage.partition.named_children())
        return layers[index]

    def cuda(self, device: Any = None) -> GPipe:
        """Refuse: the pipeline's devices are chosen when it is made."""
        raise TypeError(_MOVING)

    def cpu(self) -> GPipe:
        """Refuse: the pipeline's devices are chosen when it is made."""
        raise TypeError(_MOVING)

    def to(self, *args: Any, **kwargs: Any) -> GPipe:
        """Change the type of parameters and buffers, but refuse (`TypeError`) to move them."""
        tensors = any(isinstance(x, torch.Tensor) for x in (*args, *kwargs.values()))
        device = torch._C._nn._parse_to(*args, **kwargs)[0]
        if device is not None or tensors:
            raise TypeError(_MOVING)
        super().to(*args, **kwargs)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in _BUILT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._build()


# What `_build` makes anew in a copy.
_BUILT = ("_engine", "_shared_buffers", "_stages")

_MOVING = (
    "a GPipe keeps each partition on the device that it was made with, and cannot be moved; "
    "name the devices when wrapping the module: GPipe(module, balance, devices=[…])"
)


def micro_batches_of(
    input: TensorOrTensors, stage: Stage, chunks: int, signature: Signature | None
) -> list[TensorOrTensors]:
    """Return the micro-batches of a mini-batch, on the device of the first stage."""
    device = stage.device
    # A copy to the host must be waited for: the host could read it before it has arrived.
    input = mapped(lambda x: x.to(device, non_blocking=device.type == "cuda"), input)
    micro_batches = scatter(input, chunks, None if signature is None else signature.batched)
    if len(micro_batches) > 1 and isinstance(input, torch.Tensor) and begins_in_place(stage.partition):
        # Micro-batches are views of one tensor and share its version counter: a change of one looks like a change
        # of all.
        micro_batches = [mapped(torch.clone, x) for x in micro_batches]
    return micro_batches


def check_settings(chunks: object, checkpoint: object) -> None:
    """Raise `ValueError` if chunks or checkpoint is out of range."""
    if not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1:
        raise ValueError(f"chunks must be a whole number of at least 1, but got {chunks!r}")
    if checkpoint not in MODES:
        raise ValueError(f"checkpoint must be one of {', '.join(map(repr, MODES))}, but got {checkpoint!r}")


def _shared_buffers(stages: Sequence[Stage]) -> list[torch.Tensor]:
    found = [x for stage in stages for x in {id(x): x for x in stage.partition.buffers()}.values()]
    times = Counter(map(id, found))
    return list({id(x): x for x in found if times[id(x)] > 1 and not x.is_inference()}.values())
