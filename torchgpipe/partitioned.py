"""`Partitioned`: what pipelines of one process and of several have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn

from torchgpipe.clipping import Exchange, clip_gradients
from torchgpipe.engine.arrangement import ScheduleView
from torchgpipe.engine.batch import WorkersEngine
from torchgpipe.layers.batches import divided, samples
from torchgpipe.layers.checks import (
    AVERAGED,
    MISSED_STEPS,
    check_module,
    check_parameters,
    check_settings,
    shared_buffers,
    unchanged,
)
from torchgpipe.layers.devices import FixedDevices
from torchgpipe.layers.names import Elsewhere, translate_old_state
from torchgpipe.layers.split import Init, place, split
from torchgpipe.schedules import Schedule
from torchgpipe.skip.layout import Crossing, verify_skippables
from torchgpipe.step.hooks import Arguments, run_with_hooks, seen_by_hooks
from torchgpipe.step.request import Criterion, StepRequest
from torchgpipe.task.batchnorm import DeferredBatchNorm, commit
from torchgpipe.task.guards.modes import SetBackOnFailure
from torchgpipe.task.guards.randomness import check_apart
from torchgpipe.task.stage import OF_RUNS, Stage, locks_of
from torchgpipe.tensors._autograd import averages_gradients, misses_steps
from torchgpipe.tensors.checkpoint import Mode
from torchgpipe.tensors.microbatch import TensorOrTensors
from torchgpipe.tensors.observe import NOTHING, Observer
from torchgpipe.trace.layer import Layers, keep_names

T = TypeVar("T")


class Partitioned(FixedDevices, ABC):
    """Layers in partitions, all or some of which this process holds and runs.

    These layers are its children, by their own names: its state is that of the model, or a part.
    """

    balance: list[int]
    chunks: int
    checkpoint: Mode
    observer: Observer | None
    logs: list[Any]
    rank: int = 0
    _traced_instead: ClassVar[str]
    _partitions: nn.ModuleList
    _stages: list[Stage]
    _steps: WorkersEngine
    _schedule: str | Schedule

    def __init__(  # noqa: PLR0913 - those of `GPipe`
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
        self.balance = [len(partition) for partition in partitions]
        self.chunks, self.checkpoint, self.observer, self.logs = chunks, checkpoint, None, []
        self._schedule = schedule
        self.training = module.training
        self._signature = module.signature if isinstance(module, Layers) else None
        self.register_load_state_dict_pre_hook(translate_old_state)  # type: ignore

    def _hold(
        self,
        devices: Sequence[torch.device | None],
        places: Iterable[object],
        init: Init | None,
    ) -> None:
        """Move the partitions to their devices, and keep those that have one.

        Args:
            devices: The device of each partition; `None` if another process has the partition.
            places: Where each partition is, for messages: its device, or its rank.
            init: Fills layers.
        """
        partitions = [p for p in self._partitions if isinstance(p, nn.Sequential)]
        check_parameters(partitions, places)
        self._held = [(j, device) for j, device in enumerate(devices) if device is not None]
        own = [partitions[j] for j, _ in self._held]
        self._shared_buffers = shared_buffers(partitions, own)
        self.register_load_state_dict_pre_hook(Elsewhere(partitions, own))  # type: ignore
        keep_names(self)
        place(partitions, devices, init)
        self.__dict__["_partitions"] = nn.ModuleList(own)
        for partition in own:
            self._modules.update(partition._modules)
        self._build()

    def _build(self) -> None:
        """Make what cannot be copied or pickled: locks, streams, threads, and what has these."""
        self._stages = []
        for (j, device), partition in zip(self._held, self._partitions, strict=True):
            self._stages.append(Stage(j, partition, device))
        self._look()

    def _look(self) -> None:
        """Find the modules within the layers anew: one may have been replaced inside of another."""
        if not any([stage.look() for stage in self._stages]):  # noqa: C419 - each has to look
            return
        modules: list[nn.Module] = []
        for stage in self._stages:
            modules += stage.modules
        if averages_gradients(modules):
            raise TypeError(AVERAGED)
        crossings = self._layout()
        turn = locks_of(modules, OF_RUNS)
        for stage in self._stages:
            stage.turn = turn
            stage.connect(crossings)

    @abstractmethod
    def _layout(self) -> list[Crossing]:
        """Return the skips that cross from partition to partition."""

    @property
    def partitions(self) -> nn.ModuleList:
        """The partitions of this process, each an `nn.Sequential` of layers on its device."""
        return self._partitions

    @property
    def schedule(self) -> ScheduleView:
        """The schedule in use; its `report()` says how backwards are split."""
        return ScheduleView(self._steps.arrangement, self._stages)

    def step(  # noqa: PLR0913 - all of them belong to one step
        self,
        criterion: Criterion,
        input: Any,
        target: Any,
        *,
        reduction: str = "mean",
        weight: Callable[[Any], Any] | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> Tensor:
        """Run forward and backward of every micro-batch as the schedule says; return the loss.

            for i, (x, t) in enumerate(zip(micro_batches(input), micro_batches(target))):
                (criterion(model(x), t) * samples[i] / sum(samples)).backward()

        Gradients are added up in the order of the schedule's backwards, and added to `.grad` once,
        at the end: a step that fails changes none. An input that takes a gradient gets one, too.

        Over ranks all of them call it. The first stage's rank gives the input, the last stage's the
        target and the criterion; others may give `None`. The loss is the same on all ranks.

        Args:
            criterion: Returns a scalar for a micro-batch's output and its part of the target, or
                the scalar and anything that `model.logs` shall keep of the micro-batch.
                Whatever else it uses gets its gradient, too: parameters of its own, of the layers,
                or a tensor that it closes over. On ranks it finds the parameters of the last rank
                only.
            input: As for `forward`; of a traced module, as its sample was: a tuple or dictionary of
                arguments.
            target: Tensors with the batch as dimension 0, in tuples, lists and dictionaries; what
                is no tensor is given to every micro-batch.
            reduction: `"mean"` weighs micro-batches by their samples, and `"sum"` adds. `"none"`
                adds, too, but returns the losses of all micro-batches, as one tensor.
            weight: Returns what a part of the target counts in a mean, in place of its samples.
            scaler: Scales what goes backward. Over ranks take `ShardedGradScaler` of
                `torch.distributed.fsdp`.

        Returns:
            The loss of the mini-batch, a scalar without a graph.

        Raises:
            RuntimeError: Gradients are off; a layer does what a pipeline cannot follow; or
                `DistributedDataParallel` is around the pipeline, and would average nothing.
            TypeError: The criterion does not return a scalar.
            ValueError: The target is not of the input's batch size, or `reduction` is another.
            RankFailed: Another rank has failed.
        """
        self.logs = []
        request = StepRequest(criterion, target, reduction, weight, self.logs, scaler)
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
        """Return what `step` would return, of forwards alone; the arguments are those of `step`."""
        with torch.no_grad():
            self.logs = []
            request = StepRequest(criterion, target, reduction, weight, self.logs, backward=False)
            return cast(Tensor, self._uncompiled(self._hooked, input, request))

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the call of the pipeline returns, without gradients."""
        with torch.no_grad():
            return self(*args, **kwargs)

    def _uncompiled(self, run: Callable[..., Any], *args: Any) -> Any:
        """Call `run`, outside of what torch.compile compiles; refuse to be traced or exported."""
        untraced = f"a pipeline cannot be traced or exported; {self._traced_instead}"
        if torch.compiler.is_dynamo_compiling():
            # torch.compile would follow the scheduler, and recompile for each task; layers may be
            # compiled instead.
            return torch.compiler.disable(run, reason=untraced)(*args)
        if torch.compiler.is_exporting() or torch.jit.is_tracing():  # type: ignore
            raise RuntimeError(untraced)
        return run(*args)

    def _arguments(self, input: Any) -> Arguments:
        """Return the arguments that an input stands for: of a traced module, as in its sample."""
        return ((input,), {}) if self._signature is None else self._signature.arguments(input)

    def _hooked(self, input: Any, request: Any) -> Tensor:
        """Return what a request asks for, and run the hooks of this module as its call would."""
        given = self._arguments(input)
        return run_with_hooks(self, given, lambda given: self._carry_out(*given, request))

    @abstractmethod
    def _carry_out(self, args: tuple[Any, ...], kwargs: dict[str, Any], request: Any) -> Tensor:
        """Return the loss that a request asks for, of a mini-batch with these arguments."""

    def _seen(self, output: Any) -> Any:
        """Return what a criterion gets of an output, which hooks on this module see, too."""
        return seen_by_hooks(self, self._shown(output))

    def _shown(self, output: Any) -> Any:
        return output if self._signature is None else self._signature.structured(output)

    def _check(self) -> None:
        """Check, before a mini-batch, what may have been changed since the last one."""
        check_settings(self.chunks, self.checkpoint)
        layers: dict[str, nn.Module | None] = {}
        for stage in self._stages:
            layers.update(stage.partition._modules)
        partitions = [stage.partition for stage in self._stages]
        if self._modules != layers or partitions != [*self._partitions]:
            raise RuntimeError(
                "a layer or partition was replaced after the pipeline was made; change the layers "
                f"first, then wrap them in a {type(self).__name__} (what is inside of a layer may "
                "be replaced at any time between steps)"
            )
        self._look()
        check_apart([stage.generators for stage in self._stages])

    def _micro_batches(self, input: TensorOrTensors) -> list[TensorOrTensors]:
        """Return the micro-batches of a mini-batch, on the device of the first stage."""
        return divided(input, self.chunks, self._stages[0], self._signature)

    def _sizes(self, micro_batches: Iterable[TensorOrTensors]) -> list[int]:
        """Return how many samples each micro-batch has."""
        return [samples(micro_batch, self._signature) for micro_batch in micro_batches]

    def _mini_batch(self, run: Callable[[], T]) -> T:
        """Call `run` for a whole mini-batch, which deferred batch norms commit, or else forget."""
        norms = [norm for stage in self._stages for norm in stage.deferred_norms]
        shared = self._shared_buffers
        # One micro-batch goes through one process in the layers' order.
        several = self.chunks > 1 or len(self._stages) < len(self.balance)

        def guarded() -> T:
            with SetBackOnFailure():
                with unchanged(shared, copy=several) if shared else NOTHING:
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

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of all partitions together; return their norm.

        It does what `torch.nn.utils.clip_grad_norm_` does. The norm is that of the norms of all
        parameters in the model's order, so that any balance has the same norm. Some gradients may
        be DTensors, those of sharded parameters, and others plain tensors.
        """
        settings = {"max_norm": float(max_norm), "norm_type": float(norm_type)}
        with self._together("clip_grad_norm_", **settings) as exchange:
            stages: dict[nn.Parameter, int] = {}
            for stage in reversed(self._stages):
                stages.update(dict.fromkeys(stage.partition.parameters(), stage.index))
            return clip_gradients([*self.parameters()], stages, exchange, max_norm, norm_type)

    def _together(self, doing: str, **alike: float) -> AbstractContextManager[Exchange]:
        """Return a context for what all ranks do together: a function that exchanges a tensor.

        What is `alike` has to be the same on all ranks.
        """
        return nullcontext(lambda own: [own])

    def train(self: P, mode: bool = True) -> P:
        """Set training or evaluation mode, of the partitions too."""
        super().train(mode)
        for partition in self._partitions:
            partition.training = mode
        return self

    def __repr__(self) -> str:
        settings = f"balance={self.balance}, chunks={self.chunks}, checkpoint={self.checkpoint!r}"
        first = f"{type(self).__name__}({settings}, schedule={self.schedule.name!r}):"
        return "\n  ".join([first, *map(str, self._stages)])

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in _BUILT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._build()


P = TypeVar("P", bound=Partitioned)

_BUILT = ("_engine", "_steps", "_stages", "_connections")  # what `_build` makes anew in a copy
