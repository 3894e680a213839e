"""A mini-batch on its way through programs; it is one node of the caller's graph.

PyTorch runs the CPU nodes of an autograd graph one after another in the thread that called
`backward()`, so in one graph the partitions could not overlap. Here each task has a graph of its
own, and the pipeline as a whole is a node whose inputs are the micro-batches and all parameters.
Its forward and its backward each run the programs of all partitions (program.py): on CPU, a thread
for each (`WorkersEngine`), or a process (torchgpipe/distributed).
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from torchgpipe.engine.arrangement import Arrangement, orders, overlaps
from torchgpipe.engine.pool import Workers
from torchgpipe.engine.program import BatchIO, Common, Program
from torchgpipe.engine.relay import Relay
from torchgpipe.engine.seeds import Seeds, in_turn
from torchgpipe.schedules.check import Lists
from torchgpipe.task.entrance import mark, refuse_unusual_backward
from torchgpipe.task.guards.in_place import InPlaceForRun, in_its_turn, note_stand_ins, outer_turns
from torchgpipe.task.guards.modes import AmbientModes, SetBackOnFailure
from torchgpipe.task.guards.parameters import TOKEN
from torchgpipe.task.guards.seeded import ASKING_PRIVATE_GENERATORS
from torchgpipe.task.stage import Stage
from torchgpipe.task.stage_guards import StageGuards, stand_ins_for_run
from torchgpipe.tensors._autograd import backward_id, keeps_graph, refuse_transforms, sharded
from torchgpipe.tensors.checkpoint import Mode, checkpointed
from torchgpipe.tensors.item import unshared
from torchgpipe.tensors.microbatch import Flat, TensorOrTensors, tensors_of, together
from torchgpipe.tensors.observe import NOTHING, Observer

T = TypeVar("T")

Enter = Callable[[], AbstractContextManager[object]]


class WorkersEngine:
    """Run mini-batches through `stages` by programs.

    Each device has a worker thread; without `threads`, the calling thread does all.
    """

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
        """Call `run`, and take all stand-ins out of the layers, also after an interrupt.

        An interrupt can come before any line, so what an earlier run has left is taken out, too.
        After a second interrupt, programs may still run until the next run begins.
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
    """One mini-batch on its way through programs.

    In one process, each device has a thread if tasks can overlap and the engine allows it. Else one
    thread does all.

    Args:
        engine: The engine, whose stages are all or, on a rank, some of the pipeline's.
        m: How many micro-batches there are.
        mode: Which micro-batches are checkpointed.
        observer: Called with each task.
        base: What seeds begin with, if another process has decided that.

    Attributes:
        last: Whether the last stage is in this process.
        loss: The mini-batch's loss, without its graph, once it is known.
        guards: The guards of stages, if there may be a backward.
    """

    loss: Tensor

    def __init__(
        self,
        engine: WorkersEngine,
        m: int,
        mode: Mode,
        observer: Observer | None,
        *,
        base: int | None = None,
    ) -> None:
        stages, arrangement = engine.stages, engine.arrangement
        n = len(arrangement.placement)
        distributed = len(stages) < n
        self._engine = engine
        self._overlaps = overlaps(m, arrangement.n) and engine.threads
        self._threads = self._overlaps and not distributed
        self.last = stages[-1].index == n - 1
        self.devices = [stage.device for stage in stages]

        self._ambient = ambient = AmbientModes(self.devices, threads=self._threads)
        refuse_transforms(forward_mode=ambient.grad)
        recomputed = checkpointed(mode, m) if ambient.grad else 0
        apart = self._overlaps or distributed
        self.orders = orders(arrangement, m, mode if recomputed else "never", apart)

        self._seeds = Seeds(
            n, recomputed=recomputed > 0, grad=ambient.grad, distributed=distributed, base=base
        )
        # Not on a GPU: it has a generator for this rank alone. Not if tasks run one after another,
        # as plain layers do.
        on_gpu = any(device.type == "cuda" for device in self.devices)
        seeded = self._overlaps and not on_gpu
        self._seeded: AbstractContextManager[object] = self._seeds if seeded else NOTHING
        self.draws = self._seeds.of if seeded else in_turn

        held: dict[int, list[Stage]] = {}
        for stage in stages:
            held.setdefault(self.orders.placement[stage.index], []).append(stage)
        common = Common(n, recomputed, ambient, self.draws, observer)
        self.programs = {d: Program(held[d], common) for d in sorted(held)}
        self.guards: list[StageGuards] = []
        for program in self.programs.values():
            self.guards.extend(program.guards.values())
        self._in_place = stand_ins_for_run(self.guards)
        self._outer = outer_turns()
        for guards in self.guards:
            note_stand_ins({id(x) for x in guards.parameters.by_parameter.values()})

    def tell(self, loss: Tensor) -> None:
        """Note the mini-batch's loss, where the last stage is, and let all processes know."""
        self.loss = loss

    def run(self, lists: Lists, io: BatchIO, modes: Enter, *, keep: bool = False) -> None:
        """Let each program of this process do its list.

        Several programs have a thread each. `modes` makes a context for each thread.
        """
        if any(sharded(stage.modules) for stage in self._engine.stages):
            raise RuntimeError(
                "layers that FSDP shards (fully_shard) talk to other ranks, which has to happen in "
                "one order on all of them, but workers run at once; use engine='graph', and no "
                "step()"
            )
        relay = Relay(self.orders.placement, {action.kind == "forward" for action in lists[0]})
        threads = torch.get_num_threads()

        def run(d: int) -> None:
            # Each thread has a number of its own in PyTorch. Another number would change results in
            # their last bits, and more threads than cores would compute.
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            with self._in_place, modes():
                self.programs[d].run(lists[d], relay, io, keep=keep)

        if len(self.programs) == 1:
            run(0)
            return
        with self._in_place, ASKING_PRIVATE_GENERATORS:
            self._engine.workers.run(relay, [partial(run, d) for d in self.programs])

    def _run_noted(self, lists: Lists, io: BatchIO, modes: Enter, *, keep: bool = False) -> None:
        # An interrupt can come before any line, so what will be in the layers is noted first.
        noted = bool(self.guards) and self._engine.in_place is None
        if noted:
            self._engine.in_place = self._in_place
        self.run(lists, io, modes, keep=keep)
        if noted:
            self._engine.in_place = None

    def forward(self, lists: Lists, io: BatchIO) -> None:
        """Run lists of actions that begin with forwards, in the modes around the call."""
        with self._seeded:
            self._run_noted(lists, io, self._ambient.entered)
            # Layers have to have kept their parameters, and modes their state.
            self._ambient.all_have_run(refuse=self._threads)
            for guards in self.guards:
                guards.after_all_forwards()

    def backward(self, output_grads: list[Flat], *, keep: bool) -> list[Flat]:
        """Run the actions after the forwards, in the modes around `backward()`, as plain layers do.

        Args:
            output_grads: The gradients of each micro-batch's outputs.
            keep: Whether another backward may follow.

        Returns:
            The gradients of each micro-batch's inputs.
        """
        for guards in self.guards:
            guards.backward_begins(backward_id())
        return self._engine.in_turn(partial(self._backward, output_grads, keep))

    def _backward(self, output_grads: list[Flat], keep: bool) -> list[Flat]:
        if any(turn not in self._outer for turn in outer_turns()):
            raise RuntimeError(
                "a hook, layer or criterion goes backward through the pipeline that runs it, in "
                "the middle of another mini-batch; call backward() between mini-batches"
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
    flat: Any = _in_a_row([output.flat for output in outputs])
    if batch.guards and any(y.requires_grad for y in flat):
        widths = [len(output.flat) for output in outputs]
        flat = one_node(batch.guards, batch.backward, widths, flat, inputs)
        if len(outputs) == 1:
            given = _in_a_row([tensors_of(each) for each in inputs])
            flat = unshared(flat, outputs[0].shared, given)
    results: list[TensorOrTensors] = []
    for output in outputs:
        width = len(output.flat)
        results.append(together(output.form, tuple(flat[:width])))
        flat = flat[width:]
    return results


def _in_a_row(flats: Iterable[Flat]) -> Flat:
    return tuple(chain.from_iterable(flats))


def one_node(
    stages: Sequence[StageGuards],
    backward: Callable[..., list[Flat]],
    widths: list[int],
    outputs: Sequence[Tensor | None],
    inputs: Sequence[TensorOrTensors],
) -> Flat:
    """Make one node of the caller's graph, and return its outputs.

    Args:
        stages: The guards of the stages, whose parameters are inputs of the node.
        backward: Called with the outputs' gradients of each micro-batch, returns those of `inputs`.
        widths: How many outputs each micro-batch has.
        outputs: The outputs of all micro-batches in a row.
        inputs: The micro-batches, whose tensors are inputs of the node, too.
    """
    given = _in_a_row([tensors_of(each) for each in inputs])
    parameters = _in_a_row([tuple(guards.parameters.by_parameter) for guards in stages])
    node = _Node.apply(stages, backward, widths, outputs, *given, *parameters, TOKEN)
    return cast(Flat, node)


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
        refuse_unusual_backward(grads)
        output_grads = []
        for width in ctx.widths:
            output_grads.append(grads[:width])
            grads = grads[width:]
        keep = keeps_graph()
        with SetBackOnFailure():
            input_grads = ctx.run(output_grads, keep=keep)
        sums: list[Tensor | None] = []
        for guards in ctx.stages:
            sums.extend(guards.parameters.take(last=not keep))
        # Nothing for what is no tensor, nor for the dummy input at the end.
        return (None, None, None, None, *_in_a_row(input_grads), *sums, None)
