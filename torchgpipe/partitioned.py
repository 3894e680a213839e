"""`Partitioned`: what pipelines of one process and of several have in common, which is all but running a mini-batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn

from torchgpipe.clipping import Exchange, clip_gradients
from torchgpipe.engine.arrangement import ScheduleView
from torchgpipe.engine.batch import WorkersEngine
from torchgpipe.hooks import Arguments, run_with_hooks, seen_by_hooks
from torchgpipe.partition import (
    AVERAGED,
    MISSED_STEPS,
    MOVING,
    Elsewhere,
    Init,
    check_module,
    check_parameters,
    check_settings,
    place,
    shared_buffers,
    split,
    translate_old_state,
)
from torchgpipe.schedules import Schedule
from torchgpipe.skip.layout import Crossing, verify_skippables
from torchgpipe.step import Criterion, StepRequest
from torchgpipe.task.batchnorm import DeferredBatchNorm, commit
from torchgpipe.task.guards.contents import equal
from torchgpipe.task.guards.memory import begins_in_place
from torchgpipe.task.guards.modes import SetBackOnFailure
from torchgpipe.task.guards.randomness import check_apart
from torchgpipe.task.stage import OF_RUNS, Stage, locks_of
from torchgpipe.tensors._autograd import averages_gradients, misses_steps
from torchgpipe.tensors.checkpoint import Mode
from torchgpipe.tensors.item import versions
from torchgpipe.tensors.microbatch import TensorOrTensors, mapped, scatter, tensors_of
from torchgpipe.tensors.observe import Observer
from torchgpipe.trace.layer import Layers, keep_names

T = TypeVar("T")


class Partitioned(nn.Module, ABC):
    """Layers in partitions, of which this process holds all or some; `GPipe` and `DistributedGPipe` run them.

    The layers that this process holds are the module's own children, by their own names: its state
    is that of the wrapped module, or a part of it.
    """

    balance: list[int]
    chunks: int
    checkpoint: Mode
    observer: Observer | None
    rank: int = 0
    _traced_instead: ClassVar[str]
    _partitions: nn.ModuleList
    _stages: list[Stage]
    _steps: WorkersEngine
    _schedule: str | Schedule = "GPipe"  # of pickles that have none

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None,
        *,
        chunks: int,
        checkpoint: Mode,
        deferred_batch_norm: bool,
        schedule: str | Schedule,
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
        self._schedule = schedule
        self.training = module.training
        self._signature = module.signature if isinstance(module, Layers) else None
        self.register_load_state_dict_pre_hook(translate_old_state)  # type: ignore[no-untyped-call]

    def _hold(
        self, devices: Sequence[torch.device | None], places: Iterable[object], init: Init | None
    ) -> None:
        """Move the partitions to their devices; drop those whose device is `None`. `places` says where each is."""
        partitions = [
            partition for partition in self._partitions if isinstance(partition, nn.Sequential)
        ]
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
        self._stages = [
            Stage(j, p, device) for (j, device), p in zip(self._held, self._partitions, strict=True)
        ]
        self._look()

    def _look(self) -> None:
        """Find the modules within the layers anew: one may have been replaced inside of another."""
        if any([stage.look() for stage in self._stages]):
            if averages_gradients(module for stage in self._stages for module in stage.modules):
                raise TypeError(AVERAGED)
            crossings = self._layout()
            turn = locks_of([module for stage in self._stages for module in stage.modules], OF_RUNS)
            for stage in self._stages:
                stage.turn = turn
                stage.connect(crossings)

    @abstractmethod
    def _layout(self) -> list[Crossing]:
        """Return the skips that cross from partition to partition."""

    def _arguments(self, input: Any) -> Arguments:
        """Return the arguments that an input stands for: of a traced module as its sample, else the input alone."""
        return ((input,), {}) if self._signature is None else self._signature.arguments(input)

    def _hooked(self, input: Any, request: Any) -> Tensor:
        """Return what a request asks for; the hooks of this module are run, though it is not called."""
        return run_with_hooks(
            self, self._arguments(input), lambda given: self._carry_out(*given, request)
        )

    @abstractmethod
    def _carry_out(self, args: tuple[Any, ...], kwargs: dict[str, Any], request: Any) -> Tensor:
        """Return the loss that a request asks for, of a mini-batch with these arguments."""

    def _uncompiled(self, run: Callable[..., Any], *args: Any) -> Any:
        untraced = f"a pipeline cannot be traced or exported; {self._traced_instead}"
        if torch.compiler.is_dynamo_compiling():
            # torch.compile would follow the scheduler, and recompile for each task; layers may be
            # compiled instead.
            return torch.compiler.disable(run, reason=untraced)(*args)
        if torch.compiler.is_exporting() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            raise RuntimeError(untraced)
        return run(*args)

    @property
    def partitions(self) -> nn.ModuleList:
        """The partitions of this process, each an `nn.Sequential` of consecutive layers on its device."""
        return self._partitions

    @property
    def schedule(self) -> ScheduleView:
        """The schedule in use; its `report()` says how backwards are split."""
        return ScheduleView(self._steps.arrangement, self._stages)

    def step(
        self,
        criterion: Criterion,
        input: Any,
        target: Any,
        *,
        reduction: str = "mean",
        weight: Callable[[Any], Any] | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> Tensor:
        """Run forward and backward of every micro-batch as the schedule says; return the loss, without a graph.

            for i, (x, t) in enumerate(zip(micro_batches(input), micro_batches(target))):
                (criterion(model(x), t) * samples[i] / sum(samples)).backward()

        Gradients are added up in the order of the schedule's backwards, and added to `.grad` once,
        at the end: a step that fails changes none. An input that takes a gradient gets one, too.

        Over ranks all of them call it. The first stage's rank gives the input, the last stage's the
        target and the criterion; others may give `None`. The loss is the same on all.

        Args:
            criterion: returns a scalar for a micro-batch's output and its part of the target.
            Whatever else it uses
                gets its gradient, too: parameters of its own, of the layers, or a tensor that it
                closes over. On ranks it finds the parameters of the last rank only.
            input: as for `forward`; of a traced module, as its sample was: a tuple or dictionary of
            arguments. target: tensors with the batch as dimension 0, in tuples, lists and
            dictionaries; the rest is for all parts. reduction: `"mean"` weighs micro-batches by
            their samples, and `"sum"` adds. `"none"` adds, too, but returns
                the losses of all micro-batches, as one tensor.
            weight: returns what a part of the target counts in a mean, in place of its samples.
            scaler: scales what goes backward. Over ranks take `ShardedGradScaler` of
            `torch.distributed.fsdp`.

        Raises:
            RuntimeError: gradients are off; a layer does what a pipeline cannot follow; or
                `DistributedDataParallel` is around the pipeline, and would average nothing.
            TypeError: the criterion does not return a scalar.
            ValueError: the target is not of the input's batch size, or `reduction` is another.
            RankFailed: another rank has failed.
        """
        request = StepRequest(criterion, target, reduction, weight, scaler)
        return cast(Tensor, self._uncompiled(self._step, input, request))

    def _step(self, input: Any, request: StepRequest) -> Tensor:
        if misses_steps(self):
            raise RuntimeError(MISSED_STEPS)
        loss = self._hooked(input, request)
        # A hook of a parameter may raise here, and all ranks have to hear of it.
        with self._together("step"):
            loss.backward(torch.ones_like(loss))
        return loss.detach()

    def evaluate(
        self,
        criterion: Criterion,
        input: Any,
        target: Any,
        *,
        reduction: str = "mean",
        weight: Callable[[Any], Any] | None = None,
    ) -> Tensor:
        """Return what `step` would return, of forwards alone, without a graph; the arguments are the same."""
        with torch.no_grad():
            request = StepRequest(criterion, target, reduction, weight, backward=False)
            return cast(Tensor, self._uncompiled(self._hooked, input, request))

    def _seen(self, output: Any) -> Any:
        """Return what a criterion gets of an output, which hooks on this module see, too."""
        return seen_by_hooks(self, self._shown(output))

    def _shown(self, output: Any) -> Any:
        return output if self._signature is None else self._signature.structured(output)

    def _check(self) -> None:
        """Check, before a mini-batch, what may have been changed since the last one."""
        check_settings(self.chunks, self.checkpoint)
        layers = {
            name: layer
            for stage in self._stages
            for name, layer in stage.partition._modules.items()
        }
        if self._modules != layers or [stage.partition for stage in self._stages] != [
            *self._partitions
        ]:
            raise RuntimeError(
                "a layer or partition was replaced after the pipeline was made; change the layers "
                f"first, then wrap them in a {type(self).__name__} (what is inside of a layer may "
                "be replaced at any time between steps)"
            )
        self._look()
        check_apart([stage.generators for stage in self._stages])

    def _micro_batches(self, input: TensorOrTensors) -> list[TensorOrTensors]:
        """Return the micro-batches of a mini-batch, on the device of the first stage."""
        stage = self._stages[0]
        device = stage.device
        # A copy to the host must be waited for: the host could read it before it has arrived.
        input = mapped(lambda x: x.to(device, non_blocking=device.type == "cuda"), input)
        micro_batches = scatter(
            input, self.chunks, None if self._signature is None else self._signature.batched
        )
        if (
            len(micro_batches) > 1
            and isinstance(input, Tensor)
            and begins_in_place(stage.partition)
        ):
            # Micro-batches are views of one tensor and share its version counter: a change of one
            # looks like a change of all.
            micro_batches = [mapped(torch.clone, x) for x in micro_batches]
        return micro_batches

    def _sizes(self, micro_batches: Iterable[TensorOrTensors]) -> list[int]:
        """Return the samples of each micro-batch."""
        sizes = []
        for tensors in map(tensors_of, micro_batches):
            batched = [True] * len(tensors) if self._signature is None else self._signature.batched
            sizes.append(
                next(
                    (
                        len(x)
                        for x, split in zip(tensors, batched, strict=True)
                        if split and x.dim()
                    ),
                    1,
                )
            )
        return sizes

    def _mini_batch(self, run: Callable[[], T]) -> T:
        """Call `run` for a whole mini-batch. Deferred batch norms commit it, or forget it if it fails."""
        norms = [norm for stage in self._stages for norm in stage.deferred_norms]

        def guarded() -> T:
            with SetBackOnFailure(), self._shared_unchanged():
                result = run()
            commit(norms)
            return result

        try:
            # Without gradients, a run puts nothing into the layers.
            return self._steps.in_turn(guarded) if torch.is_grad_enabled() else guarded()
        except BaseException:
            for norm in norms:
                norm.discard()
            raise

    @contextmanager
    def _shared_unchanged(self) -> Iterator[None]:
        """Refuse what changes a buffer that two partitions have, as the order would be another one."""
        buffers = []
        for module, name in self._shared_buffers:
            x = module._buffers.get(name)
            if x is not None:
                buffers.append(x)
        # Kernels may write without counting a version. One micro-batch goes through one process in
        # the layers' order.
        several = self.chunks > 1 or len(self._stages) < len(self.balance)
        copies = [x.detach().clone() for x in buffers if several]
        before = versions(tuple(buffers))
        yield
        kept = all(equal(x, copy) is not False for x, copy in zip(buffers, copies, strict=False))
        if not kept or versions(tuple(buffers)) != before:
            raise RuntimeError(
                "two partitions have layers that change the same buffer (such as one batch norm in "
                "both), not in the order in which the layers would; give each its own layer, or "
                "keep it in evaluation mode"
            )

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of all partitions together, as `torch.nn.utils.clip_grad_norm_`; return their norm.

        It is the norm of each parameter's norms in the model's order, so that any balance has the
        same. Some gradients may be DTensors, those of sharded parameters, and others plain tensors.
        """
        settings = {"max_norm": float(max_norm), "norm_type": float(norm_type)}
        with self._together("clip_grad_norm_", **settings) as exchange:
            stages = {
                p: stage.index for stage in self._stages[::-1] for p in stage.partition.parameters()
            }
            return clip_gradients([*self.parameters()], stages, exchange, max_norm, norm_type)

    def _together(self, doing: str, **alike: float) -> AbstractContextManager[Exchange]:
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
        raise TypeError(MOVING)

    def cpu(self: P) -> P:
        """Refuse: the pipeline's devices are chosen when it is made."""
        raise TypeError(MOVING)

    def to(self: P, *args: Any, **kwargs: Any) -> P:
        """Change the type of parameters and buffers, but refuse (`TypeError`) to move them."""
        tensors = any(isinstance(x, Tensor) for x in (*args, *kwargs.values()))
        device = torch._C._nn._parse_to(*args, **kwargs)[0]
        if device is not None or tensors:
            raise TypeError(MOVING)
        return super().to(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in _BUILT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._build()


P = TypeVar("P", bound=Partitioned)

# What `_build` makes anew in a copy.
_BUILT = ("_engine", "_steps", "_stages", "_connections")
