"""`DistributedGPipe`: a pipeline whose partitions are processes."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchgpipe.batchnorm import DeferredBatchNorm, commit
from torchgpipe.checkpoint import Mode
from torchgpipe.contents import modules_of
from torchgpipe.distributed.links import Wires
from torchgpipe.distributed.step import Step, shared_failure
from torchgpipe.gpipe import check_settings, micro_batches_of
from torchgpipe.item import Item
from torchgpipe.microbatch import TensorOrTensors, check, gather, tensors_of
from torchgpipe.norm import clip_grad_norm_
from torchgpipe.observe import Observer
from torchgpipe.partition import check_module, check_parameters, choose_devices, split, translate_old_state
from torchgpipe.program import linked, one_node
from torchgpipe.randomness import check_apart, own_generators
from torchgpipe.skip import verify_skippables
from torchgpipe.skip.layout import skip_layout
from torchgpipe.stage import Stage
from torchgpipe.task_graph import leaves
from torchgpipe.trace.layer import Layers, keep_names

Init = Callable[[int, nn.Module], object]
"""Fills the parameters and buffers of a layer, whose index in the model is given."""


class DistributedGPipe(nn.Module):
    """Train an `nn.Sequential` by pipeline parallelism over processes, each of which holds one partition.

        model = DistributedGPipe(layers, balance=[2, 3], chunks=8)             # on every rank
        loss = model.loss(nn.functional.cross_entropy, x, target)             # x is used on rank 0, target on the last
        loss.backward()

    Output and gradients are those of `GPipe` on one process, which has the same arguments and rules. Parameters,
    gradients, buffers and state are those of this rank's layers, under the names that they have in the model. So an
    optimizer on each rank updates its part, and the ranks' states together are the model's.

    Args:
        module: the layers, alike on every rank. On device `meta` they take no memory, and need `init`.
        balance: layers per partition, of which there are as many as ranks.
        mesh: a dimension of a mesh, whose ranks hold the partitions; by default all ranks.
        device: this rank's; a CPU, for now.
        init: called as `init(k, layer)` for each layer k of this rank, with random numbers that depend on k and the
            default generator's seed alone, so that every balance begins alike.
        chunks, checkpoint, deferred_batch_norm: as for `GPipe`.

    Attributes:
        balance, chunks, checkpoint, observer: as of `GPipe`.
        partition: this rank's layers, an `nn.Sequential`.
        rank: the index of this rank's partition.

    Raises:
        RuntimeError: there is no process group.
        TypeError, ValueError: as `GPipe`; ranks share a parameter, a buffer that changes, or a generator; there are
            not as many partitions as ranks; a layer is on `meta`, and there is no `init`.
    """

    balance: list[int]
    chunks: int
    checkpoint: Mode
    observer: Observer | None
    partition: nn.Sequential
    _stage: Stage

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
    ) -> None:
        super().__init__()
        check_module(module)
        check_settings(chunks, checkpoint)
        verify_skippables(module)
        if not dist.is_initialized():
            raise RuntimeError(
                "ranks have not met: call torch.distributed.init_process_group(), in a program that torchrun started"
            )
        if deferred_batch_norm:
            module = DeferredBatchNorm.convert_deferred_batch_norm(module, None)
        (device,) = choose_devices([device], 1)
        if device.type == "cuda":
            raise ValueError(
                "ranks run on CPUs for now: messages go by gloo, from the host; for GPUs of one machine, use GPipe"
            )
        self._ranks = dist.get_process_group_ranks(dist.group.WORLD if mesh is None else mesh.get_group())
        self.rank = self._ranks.index(dist.get_rank())
        partitions = split(module, balance)
        self.balance = list(map(len, partitions))
        if len(partitions) != len(self._ranks):
            raise ValueError(
                f"the balance {self.balance} has {len(partitions)} partitions, but there are {len(self._ranks)} ranks"
            )
        check_parameters(partitions, [f"rank {rank}" for rank in range(len(partitions))])
        check_apart([own_generators(modules_of(partition)) for partition in partitions])
        self.chunks, self.checkpoint, self.observer = chunks, checkpoint, None
        self.training = module.training
        self._signature = module.signature if isinstance(module, Layers) else None
        own = partitions[self.rank]
        names = {*module.state_dict()} - {*own.state_dict()}
        fill(own, sum(self.balance[: self.rank]), device, init)
        self.__dict__["partition"] = own
        self._modules.update(own._modules)
        self._crossings = skip_layout(partitions)
        self.__dict__["_stage"] = Stage(self.rank, own, device)
        held = Counter(x for partition in partitions for x in {*partition.buffers()})
        self._shared_buffers = [x for x in own.buffers() if held[x] > 1]
        self.register_load_state_dict_pre_hook(translate_old_state)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_Others(names))  # type: ignore[no-untyped-call]
        keep_names(self)
        self._wires: Wires | None = None
        self._serial = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a mini-batch through the pipeline; the input counts on the first rank only.

        Returns:
            On the last rank, the output. On the others a zero whose `backward()` runs this rank's part of the
            backward, or `None` where no gradient can be asked for.

        Raises:
            RankFailed: another rank has failed.
        """
        return self._run(args, kwargs, None)

    def loss(self, criterion: Callable[[Any, Any], Tensor], input: Any, target: Any) -> Tensor:
        """Return `criterion(output, target)`, the same number on every rank; all ranks call `backward()` on it.

        `input` counts on the first rank, `criterion` and `target` on the last.

        Raises:
            TypeError: `criterion` does not return a scalar.
            RankFailed: another rank has failed.
        """
        args, kwargs = ((), input) if isinstance(input, dict) else ((input,), {})
        loss: Tensor = self._run(args, kwargs, lambda output: criterion(output, target))
        return loss

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of all ranks together, as `GPipe.clip_grad_norm_`; return their norm."""
        wires = self._connected()

        def gather(norms: Tensor) -> list[Tensor]:
            with shared_failure(wires, lambda: "clip_grad_norm_"):
                return wires.exchange(self._serial, norms)

        return clip_grad_norm_(self.parameters(), max_norm, norm_type, gather)

    def train(self, mode: bool = True) -> DistributedGPipe:
        """Set training or evaluation mode, of the partition too."""
        super().train(mode)
        self.partition.training = mode
        return self

    def close(self) -> None:
        """Close the connections to other ranks; they are made again when needed."""
        if self._wires is not None:
            self._wires.part()

    def _connected(self) -> Wires:
        if self._wires is None or self._wires.closed:
            self._wires = Wires(self._ranks, self.rank)
            self._serial = 0
            weakref.finalize(self, _part, self._wires).atexit = False
        return self._wires

    def _run(self, args: Any, kwargs: Any, criterion: Callable[[Any], Tensor] | None) -> Any:
        check_settings(self.chunks, self.checkpoint)
        wires, stage = self._connected(), self._stage
        self._serial += 1
        settings: dict[str, Any] = {"chunks": self.chunks, "checkpoint": self.checkpoint, "training": self.training}
        settings |= {"a loss": criterion is not None, "the kind of device": stage.device.type}
        norms: list[DeferredBatchNorm] = []
        result: Any = None
        step: Step | None = None

        def finish(outputs: list[Item]) -> Tensor:
            nonlocal result
            assert step is not None
            result = gather(linked(step, outputs, inputs))
            needs = any(y.requires_grad for y in tensors_of(result))
            if self._signature is not None:
                result = self._signature.structured(result)
            if criterion is None:
                return torch.zeros((), requires_grad=needs)
            result = criterion(result)
            if not isinstance(result, Tensor) or result.dim():
                raise TypeError(f"the criterion must return a scalar tensor, but returned {_described(result)}")
            return result

        try:
            with shared_failure(wires, lambda: "the call" if step is None else step.program.doing):
                if stage.look():
                    stage.connect(self._crossings)
                norms = stage.deferred_norms
                wires.meet(self._serial, stage.device, self._crossings)
                shared = [x._version for x in self._shared_buffers]
                micro_batches = self._scattered(args, kwargs) if self.rank == 0 else []
                inputs = [x for micro_batch in micro_batches for x in tensors_of(micro_batch)]
                step = Step(wires, self._serial, stage, self._crossings, settings, self.observer, micro_batches)
                value, needs = step.forward(finish)
                if [x._version for x in self._shared_buffers] != shared:
                    raise RuntimeError(
                        "layers on two ranks have one buffer, and one of them has changed it, which the other cannot "
                        "see; give each a buffer of its own"
                    )
        except BaseException:
            for norm in norms:
                norm.discard()
            raise
        commit(norms)
        if self.rank + 1 == len(self._ranks):
            return result
        if needs:
            (result,) = one_node(step, [1], leaves((value.to(stage.device),), (True,)), inputs)
            return result
        return None if criterion is None else value.to(stage.device)

    def _scattered(self, args: Any, kwargs: Any) -> list[TensorOrTensors]:
        if self._signature is not None:
            args = (self._signature.flat(args, kwargs),)
        if len(args) != 1:
            raise TypeError(f"the pipeline takes one input, a tensor or a tuple of tensors, but got {len(args)}")
        (value,) = args
        check(value)
        return micro_batches_of(value, self._stage, self.chunks, self._signature)


class _Others:
    """A hook that leaves out what a state says of the layers of other ranks."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in self._names:
            state.pop(prefix + name, None)


def fill(partition: nn.Sequential, first: int, device: torch.device, init: Init | None) -> None:
    """Give the layers memory on `device`, and values by `init`, with random numbers of each layer's own.

    `first` is the first layer's index in the model.
    """
    on_meta = [name for name, x in (*partition.named_parameters(), *partition.named_buffers()) if x.is_meta]
    if on_meta and init is None and device.type != "meta":
        raise ValueError(
            f"{on_meta[0]!r} is on device 'meta' and has no values: give init=..., which fills a layer, or build the "
            "layers on a real device"
        )
    made: dict[Tensor, Tensor] = {}  # one tensor may be in several places
    for module in partition.modules():
        for tensors in (module._parameters, module._buffers):
            for name, x in tensors.items():
                if x is not None and x.is_meta and device.type != "meta":
                    if x not in made:
                        empty = torch.empty_like(x, device=device)
                        made[x] = nn.Parameter(empty, x.requires_grad) if isinstance(x, nn.Parameter) else empty
                    tensors[name] = made[x]  # type: ignore[assignment]
    partition.to(device)
    if init is not None:
        seed = torch.initial_seed()
        for k, layer in enumerate(partition, first):
            with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
                torch.manual_seed(seed + k)
                init(k, layer)


def _part(wires: Wires) -> None:
    # In a thread of its own: nothing may wait where a pipeline is collected, which can be anywhere.
    threading.Thread(target=wires.part, name="gpipe-parts", daemon=True).start()


def _described(result: Any) -> str:
    return f"one of shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
