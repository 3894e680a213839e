"""A mini-batch on its way through programs, and what stands for it in the caller's graph: one node."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from torchgpipe.engine.program import Program
from torchgpipe.engine.schedule import overlaps
from torchgpipe.engine.seeds import Seeds, in_turn
from torchgpipe.task.ambient import Ambient, Modes
from torchgpipe.task.parameters import TOKEN
from torchgpipe.task.stage import Stage
from torchgpipe.task.task_graph import mark, refuse_create_graph
from torchgpipe.tensors._autograd import backward_id, keeps_graph, refuse_transforms
from torchgpipe.tensors.checkpoint import Mode, checkpointed
from torchgpipe.tensors.item import Item, unshared
from torchgpipe.tensors.microbatch import Flat, TensorOrTensors, together
from torchgpipe.tensors.observe import NOTHING, Observer


class Batch(ABC):
    """One mini-batch of `m` micro-batches: a program for each of `stages`, which are all `n` partitions or some.

    `base` is what its seeds begin with, if another process has decided that.

    Attributes:
        programs: in the order of `stages`.
        snapshots: what the layers hold, if there may be a backward.
    """

    def __init__(
        self, stages: Sequence[Stage], n: int, m: int, mode: Mode, observer: Observer | None, base: int | None = None
    ) -> None:
        self._overlaps = overlaps(m, n)
        self._threads = self._overlaps and len(stages) == n  # or they are processes
        self._ambient = ambient = Ambient([stage.device for stage in stages], threads=self._threads)
        refuse_transforms(forward_mode=ambient.grad)
        recomputed = checkpointed(mode, m) if ambient.grad else 0
        self._seeds = Seeds(n, recomputed=recomputed > 0, grad=ambient.grad, alone=len(stages) < n, base=base)
        # Not on a GPU: it has a generator for this rank alone. Not if tasks run one after another, as plain layers do.
        seeded = self._overlaps and all(stage.device.type != "cuda" for stage in stages)
        self._seeded: AbstractContextManager[object] = self._seeds if seeded else NOTHING
        draws = self._seeds.of if seeded else in_turn
        self.programs = [Program(stage, n, m, recomputed, ambient, draws, observer) for stage in stages]
        self.snapshots = [program.snapshot for program in self.programs if program.snapshot is not None]

    def _check_kept(self) -> None:
        """Check, after the forward, that layers have kept their parameters, and modes their state."""
        self._ambient.ended(refuse=self._threads)
        for snapshot in self.snapshots:
            snapshot.check_kept()

    def _begin_backward(self) -> Ambient:
        """Prepare the layers; return the modes where backward was called, in which plain layers would go backward."""
        for snapshot in self.snapshots:
            snapshot.begin(backward_id())
        return Ambient([program.stage.device for program in self.programs])

    @abstractmethod
    def backward(self, output_grads: list[Flat], *, keep: bool) -> list[Flat]:
        """Run every task's backward; return the gradients of the micro-batches' inputs."""


def linked(batch: Batch, outputs: Sequence[Item], inputs: Sequence[Tensor]) -> list[TensorOrTensors]:
    """Return the last partition's outputs, as those of one node of the caller's graph if they take a gradient.

    The node's inputs are `inputs` and all parameters.
    """
    flat: Any = [y for item in outputs for y in item.flat]
    if batch.snapshots and any(y.requires_grad for y in flat):
        flat = one_node(batch, [len(item.flat) for item in outputs], flat, inputs)
        if len(outputs) == 1:
            flat = unshared(flat, outputs[0].shared, inputs)
    remaining = iter(flat)
    return [together(item.form, tuple([next(remaining) for _ in item.flat])) for item in outputs]


def one_node(batch: Batch, widths: list[int], outputs: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> Flat:
    """Make one node of the caller's graph for a mini-batch; `widths` are how many outputs each micro-batch has."""
    parameters = [p for snapshot in batch.snapshots for p in snapshot.stand_ins.parameters]
    made: Flat = _Node.apply(batch, TOKEN, widths, outputs, *inputs, *parameters)
    return made


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, batch: Batch, token: Tensor, widths: list[int], outputs: list[Tensor], *inputs: Tensor
    ) -> Flat:
        ctx.set_materialize_grads(False)
        ctx.batch, ctx.widths = batch, widths
        mark(ctx, outputs)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_create_graph()
        batch: Batch = ctx.batch
        remaining = iter(grads)
        output_grads = [tuple(next(remaining) for _ in range(width)) for width in ctx.widths]
        keep = keeps_graph()
        with Modes():
            input_grads = batch.backward(output_grads, keep=keep)
        sums = [g for snapshot in batch.snapshots for g in snapshot.stand_ins.take(last=not keep)]
        return (None, None, None, None, *(g for flat in input_grads for g in flat), *sums)
