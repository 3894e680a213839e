"""`Partitioned`: what pipelines of one process and of several have in common, which is all but running a mini-batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torchgpipe.norm import clip_grad_norm_
from torchgpipe.partition import (
    AVERAGED,
    Elsewhere,
    Init,
    check_module,
    check_parameters,
    place,
    shared_buffers,
    split,
    translate_old_state,
)
from torchgpipe.skip.layout import Crossing
from torchgpipe.skip.verify import verify_skippables
from torchgpipe.task.ambient import Modes
from torchgpipe.task.batchnorm import DeferredBatchNorm, commit
from torchgpipe.task.contents import equal
from torchgpipe.task.randomness import check_apart
from torchgpipe.task.snapshot import begins_in_place
from torchgpipe.task.stage import Stage
from torchgpipe.tensors._autograd import averages_gradients
from torchgpipe.tensors.checkpoint import MODES, Mode
from torchgpipe.tensors.item import versions
from torchgpipe.tensors.microbatch import TensorOrTensors, mapped, scatter
from torchgpipe.tensors.observe import Observer
from torchgpipe.trace.layer import Layers, keep_names

T = TypeVar("T")


class Partitioned(nn.Module, ABC):
    """Layers in partitions, of which this process holds all or some; `GPipe` and `DistributedGPipe` run them.

    The layers that this process holds are the module's own children, by their own names: its state is that of the
    wrapped module, or a part of it.
    """

    balance: list[int]
    chunks: int
    checkpoint: Mode
    observer: Observer | None
    _partitions: nn.ModuleList
    _stages: list[Stage]

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None,
        *,
        chunks: int,
        checkpoint: Mode,
        deferred_batch_norm: bool,
    ) -> None:
        super().__init__()
        check_module(module)
        check_settings(chunks, checkpoint)
        verify_skippables(module)
        self._deferred = deferred_batch_norm
        if deferred_batch_norm:
            module = DeferredBatchNorm.convert_deferred_batch_norm(module, None)
        partitions = split(module, balance)
        # Past `__setattr__`, which would make the partitions children of this module.
        self.__dict__["_partitions"] = nn.ModuleList(partitions)
        self.balance = list(map(len, partitions))
        self.chunks, self.checkpoint, self.observer = chunks, checkpoint, None
        self.training = module.training
        self._signature = module.signature if isinstance(module, Layers) else None
        self.register_load_state_dict_pre_hook(translate_old_state)  # type: ignore[no-untyped-call]

    def _hold(self, devices: Sequence[torch.device | None], places: Iterable[object], init: Init | None) -> None:
        """Move the partitions to their devices; drop those whose device is `None`. `places` says where each is."""
        partitions = [partition for partition in self._partitions if isinstance(partition, nn.Sequential)]
        check_parameters(partitions, places)
        self._held = [(j, device) for j, device in enumerate(devices) if device is not None]
        own = [partitions[j] for j, _ in self._held]
        self._shared_buffers = shared_buffers(partitions, own)
        self.register_load_state_dict_pre_hook(Elsewhere(partitions, own))  # type: ignore[no-untyped-call]
        keep_names(self)
        place(partitions, devices, init)
        self.__dict__["_partitions"] = nn.ModuleList(own)
        for partition in own:
            self._modules.update(partition._modules)
        self._build()

    def _build(self) -> None:
        """Make what cannot be copied or pickled: locks, streams, threads, and what refers to them."""
        self._stages = [Stage(j, p, device) for (j, device), p in zip(self._held, self._partitions, strict=True)]
        self._look()

    def _look(self) -> None:
        """Find the modules within the layers anew: one may have been replaced inside of another."""
        if any([stage.look() for stage in self._stages]):
            if averages_gradients(module for stage in self._stages for module in stage.modules):
                raise TypeError(AVERAGED)
            crossings = self._layout()
            for stage in self._stages:
                stage.connect(crossings)

    @abstractmethod
    def _layout(self) -> list[Crossing]:
        """Return the skips that cross from partition to partition."""

    @abstractmethod
    def _run(self, *args: Any) -> Any:
        """Run a mini-batch."""

    def _uncompiled(self, *args: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            # torch.compile would follow the scheduler, and recompile for each task; layers may be compiled instead.
            return torch.compiler.disable(self._run)(*args)
        return self._run(*args)

    def _check(self) -> None:
        """Check, before a mini-batch, what may have been changed since the last one."""
        check_settings(self.chunks, self.checkpoint)
        layers = {name: layer for stage in self._stages for name, layer in stage.partition._modules.items()}
        if self._modules != layers or [stage.partition for stage in self._stages] != [*self._partitions]:
            raise RuntimeError(
                "a layer or partition was replaced after the pipeline was made; change the layers first, then wrap "
                f"them in a {type(self).__name__} (what is inside of a layer may be replaced at any time between steps)"
            )
        self._look()
        check_apart([stage.generators for stage in self._stages])

    def _micro_batches(self, input: TensorOrTensors) -> list[TensorOrTensors]:
        """Return the micro-batches of a mini-batch, on the device of the first stage."""
        stage = self._stages[0]
        device = stage.device
        # A copy to the host must be waited for: the host could read it before it has arrived.
        input = mapped(lambda x: x.to(device, non_blocking=device.type == "cuda"), input)
        micro_batches = scatter(input, self.chunks, None if self._signature is None else self._signature.batched)
        if len(micro_batches) > 1 and isinstance(input, Tensor) and begins_in_place(stage.partition):
            # Micro-batches are views of one tensor and share its version counter: a change of one looks like a change
            # of all.
            micro_batches = [mapped(torch.clone, x) for x in micro_batches]
        return micro_batches

    def _mini_batch(self, run: Callable[[], T]) -> T:
        """Call `run` for a whole mini-batch. Deferred batch norms commit it, or forget it if it fails."""
        norms = [norm for stage in self._stages for norm in stage.deferred_norms]
        shared = tuple([module._buffers.get(name) for module, name in self._shared_buffers])
        # Kernels may write without counting a version. One micro-batch goes through one process in the layers' order.
        several = self.chunks > 1 or len(self._stages) == 1
        copies = [x.detach().clone() for x in shared if x is not None and several]
        before = versions(shared)
        try:
            with Modes():
                result = run()
                if versions(shared) != before or False in map(equal, [x for x in shared if x is not None], copies):
                    raise RuntimeError(
                        "two partitions have layers that change the same buffer (such as one batch norm in both), not "
                        "in the order in which the layers would; give each its own layer, or keep it in evaluation mode"
                    )
                commit(norms)
        except BaseException:
            for norm in norms:
                norm.discard()
            raise
        return result

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of all partitions together, as `torch.nn.utils.clip_grad_norm_`; return their norm."""
        alike = {"max_norm": float(max_norm), "norm_type": float(norm_type)}
        with self._together("clip_grad_norm_", **alike) as exchange:
            return clip_grad_norm_(self.parameters(), max_norm, norm_type, exchange)

    def _together(self, doing: str, **alike: float) -> AbstractContextManager[Callable[[Tensor], list[Tensor]]]:
        """Return a context for what all ranks do together: a function by which each gives a tensor and gets all.

        What is `alike` has to be the same on all.
        """
        return nullcontext(lambda own: [own])

    def train(self: P, mode: bool = True) -> P:
        """Set training or evaluation mode, of the partitions too."""
        super().train(mode)
        for partition in self._partitions:
            partition.training = mode
        return self

    def cuda(self: P, device: Any = None) -> P:
        """Refuse: the pipeline's devices are chosen when it is made."""
        raise TypeError(_MOVING)

    def cpu(self: P) -> P:
        """Refuse: the pipeline's devices are chosen when it is made."""
        raise TypeError(_MOVING)

    def to(self: P, *args: Any, **kwargs: Any) -> P:
        """Change the type of parameters and buffers, but refuse (`TypeError`) to move them."""
        tensors = any(isinstance(x, Tensor) for x in (*args, *kwargs.values()))
        device = torch._C._nn._parse_to(*args, **kwargs)[0]
        if device is not None or tensors:
            raise TypeError(_MOVING)
        return super().to(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in _BUILT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._build()


P = TypeVar("P", bound=Partitioned)

# What `_build` makes anew in a copy.
_BUILT = ("_engine", "_stages", "_connections")

_MOVING = (
    "a pipeline keeps each partition on the device that it was made with, and cannot be moved; "
    "name the devices when wrapping the module: GPipe(module, balance, devices=[…]), or device=… on a rank"
)


def check_settings(chunks: object, checkpoint: object) -> None:
    """Raise `ValueError` if chunks or checkpoint is out of range."""
    if not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1:
        raise ValueError(f"chunks must be a whole number of at least 1, but got {chunks!r}")
    if checkpoint not in MODES:
        raise ValueError(f"checkpoint must be one of {', '.join(map(repr, MODES))}, but got {checkpoint!r}")
