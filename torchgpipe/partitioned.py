"""`Partitioned`: the base class of `GPipe` (one process) and `DistributedGPipe` (several)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from torchgpipe.clipping import Exchange, clip_gradients
from torchgpipe.layers.batches import samples
from torchgpipe.layers.checks import (
    ADDED,
    AVERAGED,
    MISSED_STEPS,
    REPLACED,
    check_module,
    check_settings,
    check_still_shared,
    shared_buffers,
    shared_parameters,
    shared_within,
    unchanged,
    warn_of_time_first,
)
from torchgpipe.layers.compiled import CompilesLayers
from torchgpipe.layers.devices import FixedDevices
from torchgpipe.layers.fixed import Fixed
from torchgpipe.layers.module_copies import copy_for_each_device
from torchgpipe.layers.names import DropOtherLayers, translate_old_state
from torchgpipe.layers.split import Init, place, split
from torchgpipe.random.generators import check_apart
from torchgpipe.schedules import Schedule
from torchgpipe.skip.layout import Crossing, verify_skippables
from torchgpipe.step.hooks import Arguments, run_with_hooks, seen_by_hooks
from torchgpipe.step.request import Criterion, StepRequest
from torchgpipe.step.returned import without_backward
from torchgpipe.task.batchnorm import DeferredBatchNorm, commit
from torchgpipe.task.guards.modes import SetBackOnFailure, kinds_of, without_autocast
from torchgpipe.task.stage import OF_RUNS, Stage, locks_of
from torchgpipe.tensors._autograd import averages_gradients, misses_steps
from torchgpipe.tensors.checkpoint import Mode
from torchgpipe.tensors.microbatch import TensorOrTensors
from torchgpipe.tensors.observe import NOTHING, Observer
from torchgpipe.trace.layer import Layers, NamedAsTraced, keep_names
from torchgpipe.uncompiled import run_uncompiled

T = TypeVar("T")
P = TypeVar("P", bound="Partitioned")
# The attributes that `_build` makes anew in a copy.
_BUILT = ("_engine", "_programs_engine", "_stages", "_connections", "_elsewhere", "logs")


class Partitioned(NamedAsTraced, CompilesLayers, FixedDevices, Fixed, ABC):
    """A model that is split into partitions; this process holds and runs some or all of them.

    The layers of this process are children of this module, under their names in the model. So their
    keys in `state_dict()` are the same as without a pipeline.

    Args:
        module, balance, chunks, checkpoint, deferred_batch_norm, schedule: As for `GPipe`.
    """

    observer: Observer | None
    logs: list[Any]
    plan: Any = None
    rank: int = 0
    _traced_instead: str  # what to trace or export instead of a pipeline, for an error message
    _partitions: nn.ModuleList
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
        warn_of_time_first(module, chunks)
        verify_skippables(module)
        self._deferred = deferred_batch_norm
        if deferred_batch_norm:
            module = DeferredBatchNorm.convert_deferred_batch_norm(module, None)
        partitions = split(module, balance)
        # Avoid `__setattr__`: it would make the partitions children of this module.
        self.__dict__["_partitions"] = nn.ModuleList(partitions)
        self._balance = [len(partition) for partition in partitions]
        self.chunks, self.checkpoint, self.observer = chunks, checkpoint, None
        self._schedule = schedule
        self.training = module.training
        self._signature = module.signature if isinstance(module, Layers) else None

    def _hold(self, devices: Sequence[torch.device | None], init: Init | None) -> None:
        """Move this process's partitions to their devices, and drop all other partitions.

        Args:
            devices: The device of each partition; `None` if another process has the partition.
            init: A function that is called as `init(k, layer)` to fill each layer k, or `None`.
        """
        partitions = [p for p in self._partitions if isinstance(p, nn.Sequential)]
        self._held = [(j, device) for j, device in enumerate(devices) if device is not None]
        own = [partitions[j] for j, _ in self._held]
        on_devices = [(partitions[j], device) for j, device in self._held]
        self._copied_buffers = copy_for_each_device(on_devices)
        self._shared_buffers = shared_buffers(partitions, own)
        for hook in (translate_old_state, DropOtherLayers(partitions, own)):
            self.register_load_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]
        keep_names(self)
        place(partitions, devices, init)
        self._shared = shared_within(own)
        self.__dict__["_partitions"] = nn.ModuleList(own)
        for partition in own:
            self._modules.update(partition._modules)
        self._build()

    def _build(self) -> None:
        """Make locks, streams and threads, which cannot be copied or pickled with this pipeline."""
        self.logs, self._calls_of_step = [], 0
        self._stages = []
        for (j, device), partition in zip(self._held, self._partitions, strict=True):
            self._stages.append(Stage(j, partition, device))
        self._look()

    def _look(self) -> None:
        """List the modules inside of each layer again, because the user may have replaced some."""
        if not any([stage.look() for stage in self._stages]):  # noqa: C419 - each has to look
            return
        modules = [*chain.from_iterable(stage.modules for stage in self._stages)]
        if averages_gradients(modules):
            raise TypeError(AVERAGED)
        self._copied_buffers = [place for place in self._copied_buffers if place[0] in modules]
        crossings = self._layout()
        turn, shared = locks_of(modules, OF_RUNS), shared_parameters(self.partitions)
        for stage in self._stages:
            stage.turn = turn
            stage.find_away(shared)
            stage.connect(crossings)

    def copies(self) -> dict[nn.Parameter, str]:
        """Map this process's copies of other processes' parameters to the parameters' names."""
        return {}

    @abstractmethod
    def _layout(self) -> list[Crossing]:
        """Return the skip connections that lead from one partition to another partition.

        `GPipe` also lists the shared buffers again.
        """

    @property
    def partitions(self) -> nn.ModuleList:
        """The partitions of this process, each an `nn.Sequential` of layers on its device."""
        return self._partitions

    def step(  # noqa: PLR0913 - all of them belong to one step
        self,
        criterion: Criterion,
        input: Any = None,
        target: Any = None,
        *,
        reduction: str = "mean",
        weight: Callable[[Any], Any] | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> Tensor:
        """Run forward and backward of each micro-batch in the schedule's order; return the loss.

        The gradients are the same as those of this loop over micro-batches of `samples[i]` samples:

            for i, (x, t) in enumerate(zip(micro_batches(input), micro_batches(target))):
                (criterion(model(x), t) * samples[i] / sum(samples)).backward()

        But `step` adds the sum over the micro-batches to `.grad` only once, at the end. So a step
        that fails changes no gradient. An input that requires grad gets its gradient, too. Under
        autocast, backwards run without it, as if `backward()` were called outside of autocast.

        In a distributed pipeline all ranks call `step`. The rank of the first stage gives `input`.
        The rank of the last stage gives `target` and `criterion`. All ranks return the same loss.

        Args:
            criterion: A function of a micro-batch's output and target. It returns a scalar, or a
                tuple of a scalar and a value that is kept in the list `model.logs`. Parameters that
                it uses get gradients, too, but a parameter of another rank raises an error.
            input: As for `forward` (if the layers were traced: like the sample), or `MicroBatches`.
            target: Tensors with the batch as dimension 0, in tuples, lists and mappings;
                `MicroBatches`; or `None`. Each micro-batch gets a part of each tensor, and all
                other values unchanged. Lists and tuples with an entry for each sample are split,
                too. A tuple of structures, such as dictionaries, is refused if dimension 0 of all
                their tensors is the batch size, too: give a list.
            reduction: `"mean"` weighs the losses by the samples of the micro-batches. `"sum"` adds
                the losses. `"none"` has the gradients of `"sum"`, but returns all losses.
            weight: A function of a micro-batch's target that returns the weight of its loss.
            scaler: Scales the loss for the backward. In a distributed pipeline, it has to be a
                `ShardedGradScaler`, of `torch.distributed.fsdp.sharded_grad_scaler`.

        Returns:
            The loss of the mini-batch: a scalar, or for `"none"` a tensor of all losses. It has no
            graph, so `backward()` of it, of `loss / 4` or of `scaler.scale(loss)` raises an error.

        Raises:
            RuntimeError: Gradients are off, a layer does something that a pipeline does not
                support, or the pipeline is inside `DistributedDataParallel`.
            TypeError: The criterion does not return a scalar.
            ValueError: Input and target differ in batch size, or `reduction` is unknown.
            RankFailed: Another rank has failed.
        """
        self.logs = []
        self._calls_of_step += 1
        looks = self._calls_of_step.bit_count() == 1  # in the calls 1, 2, 4, 8, ...
        request = StepRequest(criterion, target, reduction, weight, self.logs, scaler, looks=looks)
        return cast(Tensor, run_uncompiled(self._traced_instead, self._step, input, request))

    def _step(self, input: Any, request: StepRequest) -> Tensor:
        if misses_steps(self):
            raise RuntimeError(MISSED_STEPS)
        loss = self._hooked(input, request)
        # The backwards of all tasks have already run. This backward adds the sums of their
        # gradients to `.grad`, and runs through the graphs of the input and the target. A hook of a
        # parameter may raise an error here, which all ranks have to learn.
        kinds = kinds_of([stage.device for stage in self._stages])
        with self._together("step"), without_autocast(kinds):
            loss.backward(torch.ones_like(loss))
        return without_backward(loss)

    def evaluate(
        self,
        criterion: Criterion,
        input: Any = None,
        target: Any = None,
        *,
        reduction: str = "mean",
        weight: Callable[[Any], Any] | None = None,
    ) -> Tensor:
        """Run the forwards of a mini-batch without gradients, and return its loss.

        Args:
            criterion: A function of a micro-batch's output and target, as for `step`.
            input: The mini-batch, as for `step`.
            target: The target of the mini-batch, as for `step`.
            reduction: `"mean"`, `"sum"` or `"none"`, as for `step`.
            weight: A function of a micro-batch's target that returns the weight of its loss.
        """
        with torch.no_grad():
            self.logs = []
            request = StepRequest(criterion, target, reduction, weight, self.logs, backward=False)
            return cast(Tensor, run_uncompiled(self._traced_instead, self._hooked, input, request))

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Run a mini-batch without gradients, and return the pipeline's output.

        Give the arguments of a call of the pipeline, or a single `input` as for `evaluate`.
        """
        if len(args) == 1 and not kwargs:
            args, kwargs = self._arguments(args[0])
        with torch.no_grad():
            return self(*args, **kwargs)

    def _arguments(self, input: Any) -> Arguments:
        """Convert a pipeline's input to positional and keyword arguments of `forward`."""
        return ((input,), {}) if self._signature is None else self._signature.arguments(input)

    def _hooked(self, input: Any, request: Any) -> Tensor:
        """Run a mini-batch with this module's forward hooks, as a call does; return the loss."""
        given = self._arguments(input)
        return run_with_hooks(self, given, lambda given: self._run_for_loss(*given, request))

    @abstractmethod
    def _run_for_loss(self, args: tuple[Any, ...], kwargs: dict[str, Any], request: Any) -> Tensor:
        """Run a mini-batch and return its loss; `args` and `kwargs` are arguments of `forward`."""

    def _for_criterion(self, output: Any) -> Any:
        """Run this module's forward hooks on an output; return the output for the criterion."""
        return seen_by_hooks(self, self._structured(output))

    def _structured(self, output: Any) -> Any:
        return output if self._signature is None else self._signature.structured(output)

    def _check(self) -> None:
        """Check the settings and the layers, which the user may have changed since the last run."""
        check_settings(self.chunks, self.checkpoint)
        partitions = [stage.partition for stage in self._stages]
        layers = dict(chain.from_iterable(each._modules.items() for each in partitions))
        added = [k for k in self._modules if k not in layers and not hasattr(type(self), k)]
        if added:
            raise RuntimeError(ADDED.format(added[0]))
        if self._modules != layers or partitions != [*self._partitions]:
            raise RuntimeError(REPLACED)
        for uses in self._shared:
            check_still_shared(uses)
        self._look()
        check_apart([stage.generators for stage in self._stages])

    def _sizes(self, micro_batches: Iterable[TensorOrTensors]) -> list[int]:
        """Return how many samples each micro-batch has."""
        return [samples(micro_batch, self._signature) for micro_batch in micro_batches]

    def _mini_batch(self, run: Callable[[], T], m: int) -> T:
        """Run a mini-batch by calling `run`; then update the statistics of deferred batch norms."""
        norms = [*chain.from_iterable(stage.deferred_norms for stage in self._stages)]
        shared, copied = self._shared_buffers, self._copied_buffers
        # Only one micro-batch in one process runs the layers in their plain order.
        reordered = m > 1 or len(self._stages) < len(self.balance)

        def guarded() -> T:
            with SetBackOnFailure():
                with unchanged(copied, copy=True) if copied else NOTHING:
                    with unchanged(shared, copy=reordered) if shared else NOTHING:
                        result = run()
                    commit(norms)
                return result

        try:
            # Without gradients, a run does not replace the parameters in the layers.
            return self._programs_engine.in_turn(guarded) if torch.is_grad_enabled() else guarded()
        except BaseException:
            for norm in norms:
                norm.discard()
            raise

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients by their total norm over all partitions; return this norm.

        This does what `torch.nn.utils.clip_grad_norm_` does for a model without a pipeline. The
        norm is equal, to the last bit, for any balance. Gradients can be tensors and DTensors.
        """
        settings = {"max_norm": float(max_norm), "norm_type": float(norm_type)}
        with self._together("clip_grad_norm_", **settings) as exchange:
            partitions = {stage.index: stage.partition for stage in self._stages}
            return clip_gradients(partitions, self.copies(), exchange, **settings)

    def _together(self, doing: str, **alike: float) -> AbstractContextManager[Exchange]:
        """Return a context, for a method that all ranks call, in which they exchange tensors.

        The context gives a function that sends this rank's tensor to all ranks, and returns the
        tensors of all ranks. `doing` is the method's name, and `alike` are its arguments.
        """
        return nullcontext(lambda own: [own])

    def train(self: P, mode: bool = True) -> P:
        """Set training or evaluation mode of this module and of its partitions."""
        super().train(mode)
        for partition in self._partitions:
            partition.training = mode
        return self

    def __repr__(self) -> str:
        settings = f"balance={self.balance}, chunks={self.chunks}, checkpoint={self.checkpoint!r}"
        first = f"{type(self).__name__}({settings}, schedule={self.schedule.name!r}):"
        if len(self._stages) < len(self.balance):
            ranks = 1 + max(self.schedule.placement)
            first += f" rank {self.rank} of {ranks}"
        return "\n  ".join([first, *map(str, self._stages)])

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in _BUILT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._build()
