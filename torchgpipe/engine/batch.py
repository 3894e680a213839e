"""Run a mini-batch in several threads or processes, as one node of the caller's autograd graph.

PyTorch runs all CPU nodes of a graph one after another, in the thread that called `backward()`. So
with one graph, the partitions could not work at the same time in backward. Here each task has its
own graph. The whole pipeline is one node of the caller's graph, with the micro-batches and all
parameters as inputs. The forward and the backward of this node run a program (a list of tasks) for
each device. Each program has a thread (`ProgramsEngine`), or a process (torchgpipe/distributed).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from itertools import chain
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from torchgpipe.engine.arrangement import Arrangement, orders, overlaps, warn_of_order
from torchgpipe.engine.pool import IN_A_TASK, SHARDED, Workers
from torchgpipe.engine.program import BatchIO, Common, Program
from torchgpipe.engine.relay import Relay
from torchgpipe.engine.seeds import Seeds, usual_randomness
from torchgpipe.random.seeded import ASKING_PRIVATE_GENERATORS
from torchgpipe.schedules.check import Lists
from torchgpipe.task.entrance import mark, refuse_unusual_backward
from torchgpipe.task.guards.modes import AmbientModes, SetBackOnFailure
from torchgpipe.task.guards.parameters import TOKEN
from torchgpipe.task.guards.stand_ins import StandInsForRun
from torchgpipe.task.stage import Stage, seed_gpus_apart
from torchgpipe.task.stage_guards import StageGuards, stand_ins_for_run
from torchgpipe.task.turns import in_its_turn, note_stand_ins, outer_turns
from torchgpipe.task.where import shorten
from torchgpipe.tensors import accelerator
from torchgpipe.tensors._autograd import backward_id, keeps_graph, refuse_transforms, sharded
from torchgpipe.tensors.checkpoint import Mode, checkpointed
from torchgpipe.tensors.copy import CopyPath
from torchgpipe.tensors.item import unshared
from torchgpipe.tensors.microbatch import Flat, TensorOrTensors, tensors_of, together
from torchgpipe.tensors.observe import NOTHING, Observer

T = TypeVar("T")

Enter = Callable[[], AbstractContextManager[object]]


class ProgramsEngine:
    """Run mini-batches through stages, as a program (a list of actions) for each device.

    With a thread for each device, this is the workers engine. Without threads, it runs the `step`
    of pipelines whose `model(x)` runs on the graph engine, and the one program of a rank.

    Args:
        stages: The stages of this process, in order.
        arrangement: The schedule, and the device of each stage of the pipeline.
        threads: Whether each device has a thread, if the stages of several devices are here. If
            not, the calling thread runs everything.
        copy_streams: Whether copies between GPUs have their own streams.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        arrangement: Arrangement,
        *,
        threads: bool = True,
        copy_streams: bool = True,
    ) -> None:
        self.stages, self.arrangement, self.threads = stages, arrangement, threads
        warn_of_order(arrangement, stages)
        self.workers = Workers(max(0, arrangement.n - 1))
        devices = {stage.index: stage.device for stage in stages}
        self.path = cache(partial(CopyPath, devices, own=copy_streams))
        self.stand_ins: StandInsForRun | None = None  # the current run's changes in the layers

    def run(
        self, micro_batches: Sequence[TensorOrTensors], mode: Mode, observer: Observer | None
    ) -> list[TensorOrTensors]:
        """Run the forwards; return the last partition's output for each micro-batch.

        Args:
            micro_batches: The micro-batches, on the device of the first stage.
            mode: Which micro-batches are checkpointed.
            observer: A function that returns a context in which a task runs, such as a timer.
        """
        return run_forward(Batch(self, len(micro_batches), mode, observer), micro_batches)

    def in_turn(self, run: Callable[[], T]) -> T:
        """Wait until no other thread computes gradients with these layers, and call `run`.

        A run replaces the layers' parameters by other tensors (stand-ins). If `run` fails, put the
        parameters back. After an interrupt (Ctrl-C), worker threads may still run, or stand-ins may
        be left. So before `run`, wait for these threads, and put the parameters back.
        """

        def run_in_turn() -> T:
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

        return in_its_turn(self.stages[0].turn, run_in_turn)

    def _take_back(self) -> None:
        if self.stand_ins is not None:
            self.stand_ins.take_back()
            self.stand_ins = None


class Batch:
    """The run of one mini-batch, or of this rank's part of it, through the pipeline.

    In a `GPipe`, each device has its own thread if several tasks can run at the same time and the
    engine allows threads. Otherwise, one thread runs all tasks.

    Args:
        engine: The engine. It has all stages of the pipeline, or only those of this rank.
        m: The number of micro-batches.
        mode: Which micro-batches are checkpointed.
        observer: A function that returns a context in which a task runs, such as a timer.
        base: The number from which the tasks' random seeds are made, if another rank has drawn it
            for all ranks. With `None`, this process draws the number.

    Attributes:
        last: Whether the last stage is in this process.
        loss: The loss of the mini-batch, without its graph. It is set when the loss is known.
        guards: For each stage, the guards that make its recomputations equal to its forwards
            (`StageGuards`); empty if gradients are off.
        elsewhere: Maps the parameters of other ranks' layers to their names.
        seeding: The context in which to call `forward`: `Seeds`, or a context that does nothing.
    """

    loss: Tensor
    elsewhere: Mapping[Tensor, str] = {}

    def __init__(
        self,
        engine: ProgramsEngine,
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
            n, recomputes=recomputed > 0, grad=ambient.grad, distributed=distributed, base=base
        )
        # Only tasks that run at the same time need seeds. All other tasks draw from the default
        # generator, in the same order as layers without a pipeline. On GPUs, tasks need no seeds,
        # because each GPU has its own generator.
        on_gpu = any(device.type == accelerator.KIND for device in self.devices)
        if on_gpu:
            seed_gpus_apart(stages, arrangement.placement)
        seeded = self._overlaps and not on_gpu
        self.seeding: AbstractContextManager[object] = self._seeds if seeded else NOTHING
        self.draws = self._seeds.seeded_randomness if seeded else usual_randomness

        held: dict[int, list[Stage]] = {}
        for stage in stages:
            held.setdefault(self.orders.placement[stage.index], []).append(stage)
        common = Common(n, recomputed, ambient, self.draws, observer, engine.path)
        self.programs = {d: Program(held[d], common) for d in sorted(held)}
        self.guards: list[StageGuards] = []
        for program in self.programs.values():
            self.guards.extend(program.guards.values())
        self._stand_ins = stand_ins_for_run(self.guards)
        self._outer = outer_turns()
        for guards in self.guards:
            note_stand_ins({id(x) for x in guards.parameters.by_parameter.values()})

    def tell(self, loss: Tensor) -> None:
        """Keep the loss of the mini-batch; in a distributed pipeline, send it to all ranks."""
        self.loss = loss

    def run(self, lists: Lists, io: BatchIO, modes: Enter, *, keep: bool = False) -> None:
        """Run each list of actions in a thread; if there is only one, run it in this thread.

        Args:
            lists: For each program, its actions: those of one device, or of all devices.
            io: The inputs and outputs of the pipeline, and the gradients of both.
            modes: Returns a context that sets the caller's modes, such as autocast, in a thread.
            keep: Whether to keep the graphs, so that another backward is possible later.

        Raises:
            RuntimeError: If FSDP shards a layer, or a layer calls the pipeline within a task.
        """
        relay = Relay(self.orders.placement, {action.kind == "forward" for action in lists[0]})
        threads = torch.get_num_threads()

        def run(d: int) -> None:
            # `torch.get_num_threads()` is a setting of each thread. Copy the caller's setting:
            # another number can change the last bits of results, or start more threads than cores.
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            with self._stand_ins, modes():
                self.programs[d].run(lists[d], relay, io, keep=keep)

        if len(self.programs) == 1:
            run(0)
            return
        own = self.orders.placement[-1]  # this thread runs the last stage, and so the criterion
        for stage in self._engine.stages:
            lock: Any = stage.lock
            if self.orders.placement[stage.index] != own and lock._is_owned():
                # Another thread would wait for the lock, and this thread would wait for it.
                raise RuntimeError(IN_A_TASK)
        if any(sharded(stage.modules) for stage in self._engine.stages):
            raise RuntimeError(SHARDED)
        # Enter the context here, too, so that no thread that ends early takes the stand-ins away.
        with self._stand_ins, ASKING_PRIVATE_GENERATORS:
            in_order = sorted(self.programs, key=lambda d: d == own)
            self._engine.workers.run(relay, [partial(run, d) for d in in_order])

    def _run_noted(self, lists: Lists, io: BatchIO, modes: Enter, *, keep: bool = False) -> None:
        # An interrupt can come before any line, so record the changes before they are made.
        noted = bool(self.guards) and self._engine.stand_ins is None
        if noted:
            self._engine.stand_ins = self._stand_ins
        self.run(lists, io, modes, keep=keep)
        if noted:
            self._engine.stand_ins = None

    def forward(self, lists: Lists, io: BatchIO) -> None:
        """Run all lists of actions (see `run`), in the modes of the calling thread.

        In a `step`, the lists have all actions, and otherwise the forwards only. A mode is, for
        example, autocast. The caller must have entered the context `seeding`.
        """
        self._run_noted(lists, io, self._ambient.entered)
        # Check that layers have not replaced parameters, and that modes have not changed.
        self._ambient.all_have_run(refuse=self._threads)
        for guards in self.guards:
            guards.after_all_forwards()

    def backward(self, output_grads: list[Flat], *, keep: bool) -> list[Flat]:
        """Run all actions except forwards, in the modes of the code that calls `backward()`.

        Args:
            output_grads: The gradients of the outputs of each micro-batch.
            keep: Whether another backward may follow (`retain_graph=True`).

        Returns:
            The gradients of the inputs of each micro-batch.
        """
        for guards in self.guards:
            guards.backward_begins(backward_id())
        return self._engine.in_turn(partial(self._backward, output_grads, keep))

    def _backward(self, output_grads: list[Flat], keep: bool) -> list[Flat]:
        if any(turn not in self._outer for turn in outer_turns()):
            raise RuntimeError(
                "a hook, layer or criterion calls backward() on an output of its own pipeline, in "
                "the middle of another mini-batch; call backward() between mini-batches"
            )
        ambient, io = AmbientModes(self.devices), BatchIO(output_grads=output_grads)
        self._run_noted(self.orders.rest, io, ambient.again, keep=keep)
        ambient.all_have_run(refuse=self._threads)
        return [grads for _, grads in sorted(io.input_grads.items())]


def run_forward(batch: Batch, inputs: Sequence[TensorOrTensors]) -> list[TensorOrTensors]:
    """Run the forwards of a mini-batch; return the outputs of its micro-batches.

    Only the process with the last stage has outputs; in other processes, the list is empty. If an
    output requires grad, all outputs come from one node of the caller's graph.
    """
    io = BatchIO(inputs)
    with batch.seeding:
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
    all_guards: Sequence[StageGuards],
    backward: Callable[..., list[Flat]],
    widths: list[int],
    outputs: Sequence[Tensor | None],
    inputs: Sequence[TensorOrTensors],
) -> Flat:
    """Make a node of the caller's graph, whose backward runs the whole mini-batch's backward.

    Args:
        all_guards: The guards of the stages, which have the parameters and the sums of their
            gradients.
        backward: A function that the node's backward calls with the gradients of the outputs of
            each micro-batch. It returns the gradients of `inputs`.
        widths: The number of output tensors of each micro-batch.
        outputs: The output tensors of all micro-batches in one sequence, without graphs.
        inputs: The micro-batches. They and the parameters become inputs of the node.

    Returns:
        The outputs of the node, which have the data of `outputs`.
    """
    given = _in_a_row([tensors_of(each) for each in inputs])
    parameters = _in_a_row([tuple(guards.parameters.by_parameter) for guards in all_guards])
    node = _Node.apply(all_guards, backward, widths, outputs, *given, *parameters, TOKEN)
    return cast(Flat, node)


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, all_guards: Any, backward: Any, widths: list[int], outputs: Flat, *inputs: Tensor
    ) -> Flat:
        ctx.set_materialize_grads(False)
        ctx.all_guards, ctx.run, ctx.widths = all_guards, backward, widths
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
        try:
            with SetBackOnFailure():
                input_grads = ctx.run(output_grads, keep=keep)
        except Exception as error:
            shorten(error)
            raise
        sums: list[Tensor | None] = []
        for guards in ctx.all_guards:
            sums.extend(guards.parameters.take(last=not keep))
        # The first four arguments are not tensors, and the last one is the dummy input.
        return (None, None, None, None, *_in_a_row(input_grads), *sums, None)
