"""A mini-batch on its way through programs; it is one node of the caller's graph.

PyTorch runs the CPU nodes of an autograd graph one after another in the thread that called `backward()`, so in one
graph the partitions could not overlap. Here each task has a graph of its own, and the pipeline as a whole is a node
whose inputs are the micro-batches and all parameters. Its forward and its backward each run the programs of all
partitions (program.py): on CPU, a thread for each (`WorkersEngine`), or a process (torchgpipe/distributed).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from torchgpipe.engine.arrangement import Arrangement, orders, overlaps
from torchgpipe.engine.pool import Workers
from torchgpipe.engine.program import BatchIO, Program
from torchgpipe.engine.relay import Relay
from torchgpipe.engine.seeds import Seeds, in_turn
from torchgpipe.schedules.check import Lists
from torchgpipe.task.entrance import mark, refuse_create_graph
from torchgpipe.task.guards.in_place import InPlaceForRun, in_its_turn, note_stand_ins, outer_turns
from torchgpipe.task.guards.modes import AmbientModes, SetBackOnFailure
from torchgpipe.task.guards.parameters import TOKEN
from torchgpipe.task.guards.seeded import ASKING_PRIVATE_GENERATORS
from torchgpipe.task.stage_guards import StageGuards, stand_ins_for_run
from torchgpipe.task.stage import Stage
from torchgpipe.tensors._autograd import backward_id, keeps_graph, refuse_transforms, sharded
from torchgpipe.tensors.checkpoint import Mode, checkpointed
from torchgpipe.tensors.item import unshared
from torchgpipe.tensors.microbatch import Flat, TensorOrTensors, tensors_of, together
from torchgpipe.tensors.observe import NOTHING, Observer

T = TypeVar("T")

Enter = Callable[[], AbstractContextManager[object]]


class WorkersEngine:
    """Run mini-batches through `stages` with a worker for each device, or without `threads` in the calling one."""

    def __init__(
        self, stages: Sequence[Stage], arrangement: Arrangement, *, threads: bool = True
    ) -> None:
        self.stages, self.arrangement, self.threads = stages, arrangement, threads
        self.workers = Workers(max(0, arrangement.n - 1))
        self.in_place: InPlaceForRun | None = None  # what the present run has put into the layers

    def run(
        self, micro_batches: Sequence[TensorOrTensors], mode: Mode, observer: Observer | None
    ) -> list[TensorOrTensors]:
        """Return the last partition's output for each micro-batch."""
        return run_forward(Batch(self, len(micro_batches), mode, observer), micro_batches)

    def in_turn(self, run: Callable[[], T]) -> T:
        """Call `run` when no other thread is in a run that takes gradients through these layers."""
        return in_its_turn(self.stages[0].turn, lambda: self._cleared(run))

    def _cleared(self, run: Callable[[], T]) -> T:
        """Call `run`; whatever ends it, or has ended the last run, nothing stays in the layers.

        An interrupt can come before any line. After a second one, programs may still run until the next run begins.
        """
        if outer_turns():
            return run()
        self.workers.wait()
        self._take_back()
        try:
            return run()
        except BaseException:
            if self.workers.is_over():
                self._take_back()
            raise

    def _take_back(self) -> None:
        if self.in_place is not None:
            self.in_place.take_back()
            self.in_place = None


class Batch:
    """One mini-batch of `m` micro-batches on arranged stages, of which this process has all or some.

    In one process, each device has a thread if tasks can overlap and the engine allows it. Else one thread does all.
    `base` is what its seeds begin with, if another process has decided that. There are `guards` of stages
    if there may be a backward. `last`: whether the last stage is in this process.
    """

    loss: Tensor  # the mini-batch's, without its graph, once it is known

    def __init__(
        self,
        engine: WorkersEngine,
        m: int,
        mode: Mode,
        observer: Observer | None,
        *,
        base: int | None = None,
    ) -> None:
        self._engine, stages, arrangement = engine, engine.stages, engine.arrangement
        n = len(arrangement.placement)
        self.last = stages[-1].index == n - 1
        distributed = len(stages) < n  # among processes
        self._overlaps = overlaps(m, arrangement.n) and engine.threads
        self._threads = self._overlaps and not distributed
        self.devices = [stage.device for stage in stages]
        self._ambient = ambient = AmbientModes(self.devices, threads=self._threads)
        refuse_transforms(forward_mode=ambient.grad)
        recomputed = checkpointed(mode, m) if ambient.grad else 0
        self._seeds = Seeds(
            n, recomputed=recomputed > 0, grad=ambient.grad, distributed=distributed, base=base
        )
        # Not on a GPU: it has a generator for this rank alone. Not if tasks run one after another, as plain layers do.
        seeded = self._overlaps and all(stage.device.type != "cuda" for stage in stages)
        self._seeded: AbstractContextManager[object] = self._seeds if seeded else NOTHING
        self.draws = draws = self._seeds.of if seeded else in_turn
        self.orders = orders(
            arrangement, m, mode if recomputed else "never", self._overlaps or distributed
        )
        held: dict[int, list[Stage]] = {}
        for stage in stages:
            held.setdefault(self.orders.placement[stage.index], []).append(stage)
        self.programs = {
            d: Program(own, n, recomputed, ambient, draws, observer)
            for d, own in sorted(held.items())
        }
        self.guards = [
            each for program in self.programs.values() for each in program.guards.values()
        ]
        self._in_place = stand_ins_for_run(self.guards)
        self._outer = outer_turns()
        for guards in self.guards:
            note_stand_ins({id(x) for x in guards.parameters.by_parameter.values()})

    def tell(self, loss: Tensor) -> None:
        """Note the mini-batch's loss, where the last stage is, and let all processes know."""
        self.loss = loss

    def run(self, lists: Lists, io: BatchIO, modes: Enter, *, keep: bool = False) -> None:
        """Let each program of this process do its list, in such modes: in a thread of its own, if there are several."""
        if sharded(module for stage in self._engine.stages for module in stage.modules):
            raise RuntimeError(
                "layers that FSDP shards (fully_shard) talk to other ranks, which has to happen in one order on all of "
                "them, but workers run at once; use engine='graph', and no step()"
            )
        relay = Relay(self.orders.placement, {action.kind == "forward" for action in lists[0]})
        threads = torch.get_num_threads()

        def run(d: int) -> None:
            # PyTorch keeps this number for each thread apart. Another one would change the bits, and crowd the cores.
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            with self._in_place, modes():
                self.programs[d].run(lists[d], relay, io, keep=keep)

        if len(self.programs) == 1:
            return run(0)
        with self._in_place, ASKING_PRIVATE_GENERATORS:
            self._engine.workers.run(relay, [partial(run, d) for d in self.programs])

    def _run_noted(self, lists: Lists, io: BatchIO, modes: Enter, *, keep: bool = False) -> None:
        # An interrupt can come before any line, so it is noted first what will be in the layers.
        noted = bool(self.guards) and self._engine.in_place is None
        if noted:
            self._engine.in_place = self._in_place
        self.run(lists, io, modes, keep=keep)
        if noted:
            self._engine.in_place = None

    def forward(self, lists: Lists, io: BatchIO) -> None:
        """Do the lists, which begin with forwards, as the modes were when this was made."""
        with self._seeded:
            self._run_noted(lists, io, self._ambient.entered)
            # Layers have to have kept their parameters, and modes their state.
            self._ambient.all_have_run(refuse=self._threads)
            for guards in self.guards:
                guards.after_all_forwards()

    def backward(self, output_grads: list[Flat], *, keep: bool) -> list[Flat]:
        """Do the rest, in the modes of now, as plain layers would; return the gradients of the micro-batches' inputs.

        `keep` says whether that may come again.
        """
        for guards in self.guards:
            guards.backward_begins(backward_id())
        return self._engine.in_turn(partial(self._backward, output_grads, keep))

    def _backward(self, output_grads: list[Flat], keep: bool) -> list[Flat]:
        if any(turn not in self._outer for turn in outer_turns()):
            raise RuntimeError(
                "a hook, layer or criterion goes backward through the pipeline that runs it, in the middle of another "
                "mini-batch; call backward() between mini-batches"
            )
        ambient, io = AmbientModes(self.devices), BatchIO(output_grads=output_grads)
        self._run_noted(self.orders.rest, io, ambient.again, keep=keep)
        ambient.all_have_run(refuse=self._threads)
        return [grads for _, grads in sorted(io.input_grads.items())]


def run_forward(batch: Batch, inputs: Sequence[TensorOrTensors]) -> list[TensorOrTensors]:
    """Run every task's forward; return the last partition's outputs, if it is in this process.

    They are those of one node of the caller's graph if they take a gradient.
    """
    io = BatchIO(inputs)
    batch.forward(batch.orders.forwards, io)
    outputs = [output for _, output in sorted(io.outputs.items())]
    flat: Any = [y for item in outputs for y in item.flat]
    if batch.guards and any(y.requires_grad for y in flat):
        flat = one_node(
            batch.guards, batch.backward, [len(item.flat) for item in outputs], flat, inputs
        )
        if len(outputs) == 1:
            flat = unshared(
                flat, outputs[0].shared, [x for each in inputs for x in tensors_of(each)]
            )
    remaining = iter(flat)
    return [together(item.form, tuple([next(remaining) for _ in item.flat])) for item in outputs]


def one_node(
    stages: Sequence[StageGuards],
    backward: Callable[..., list[Flat]],
    widths: list[int],
    outputs: Sequence[Tensor | None],
    inputs: Sequence[TensorOrTensors],
) -> Flat:
    """Make one node of the caller's graph; `widths` are how many outputs each micro-batch has.

    The node's inputs are those of `inputs`, the micro-batches, and all parameters; `backward` is a batch's.
    """
    given = [x for micro_batch in inputs for x in tensors_of(micro_batch)]
    parameters = [p for guards in stages for p in guards.parameters.by_parameter]
    return cast(Flat, _Node.apply(stages, backward, widths, outputs, *given, *parameters, TOKEN))


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, stages: Any, backward: Any, widths: list[int], outputs: Flat, *inputs: Tensor
    ) -> Flat:
        ctx.set_materialize_grads(False)
        ctx.stages, ctx.run, ctx.widths = stages, backward, widths
        mark(ctx, outputs)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_create_graph()
        remaining = iter(grads)
        output_grads = [tuple(next(remaining) for _ in range(width)) for width in ctx.widths]
        keep = keeps_graph()
        with SetBackOnFailure():
            input_grads = ctx.run(output_grads, keep=keep)
        sums = [g for guards in ctx.stages for g in guards.parameters.take(last=not keep)]
        return (*[None] * 4, *(g for flat in input_grads for g in flat), *sums, None)
