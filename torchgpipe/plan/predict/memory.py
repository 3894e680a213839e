"""Predict the peak memory of each device during a training step.

The prediction goes through a device's list of actions (forwards, recomputations and backwards) and
adds up bytes for each action. It assumes that all micro-batches have the same size. During an
action, these tensors are on a device:

- always: the parameters, the buffers and the optimizer's state. The device of the first stage also
  has the mini-batch. A parameter that several layers share counts once on each device that has one
  of these layers;
- stashed: the tensors that tasks between forward and backward keep. A checkpointed task keeps its
  inputs. A task without checkpointing keeps the tensors that its autograd graph has saved. A task
  that has only its weights' gradients left to compute keeps the tensors for that;
- working: the tensors that the action itself allocates, from the footprints of its layers;
- copies: the next input, the gradient of the output and the gradient of the last input, while these
  tensors are copied between devices;
- skips: the skips between two stages, and their gradients on the way back;
- gradients: the sum of this step's gradients, from the end of the first backward on. Gradients that
  stay allocated between steps also count;
- update: the tensors that the optimizer's step allocates after the last backward (see `optimizer`),
  or the other devices' gradients of shared parameters, which arrive before it.

CPU devices share their memory, so nothing is copied between them. A tensor that several CPU devices
use counts on only one of these devices.

Only tensors count. The prediction leaves out the memory that an allocator reserves beyond the
tensors, the workspaces of libraries, the tensors that a criterion keeps, and the copies of buffers
that checkpointed tasks make.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torchgpipe.plan.count.count import Counts
from torchgpipe.plan.count.footprint import Footprint, LayerCount, Stashed
from torchgpipe.plan.count.task_bytes import TaskBytes
from torchgpipe.plan.count.tied import counted_once
from torchgpipe.plan.predict.between import crossing, shared_parameters
from torchgpipe.plan.predict.moments import Moment, Traffic, moments
from torchgpipe.plan.predict.predict import Setup
from torchgpipe.tensors.checkpoint import checkpointed

Crossings = Sequence[tuple[int, int, Stashed]]
"""The skips between stages: for each, the stage that stashes, the stage that pops, and the skip."""


class DeviceBytes(NamedTuple):
    """The bytes that a device has allocated when its memory is fullest, by their purpose."""

    parameters: float
    gradients: float
    optimizer: float
    stashed: float = 0.0
    working: float = 0.0
    skips: float = 0.0
    copies: float = 0.0
    update: float = 0.0
    """What the optimizer's step allocates, if the memory is fullest during that step."""

    @property
    def peak(self) -> float:
        """The peak of the bytes that the device has allocated, in a step after the first."""
        return sum(self)


def setup_memory(counts: Counts, setup: Setup) -> list[DeviceBytes]:
    """Return the peak memory of every device, for a step after the first.

    The prediction assumes that all micro-batches are as large as the first micro-batch, although
    the last micro-batch can be smaller.
    """
    sizes = setup.sizes
    crossings = crossing(counts.footprints(sizes[0]), setup.cuts)
    m = len(sizes)
    if isinstance(setup.schedule, str) and not setup.gathered:
        m = min(m, 4 * len(setup.balance))  # These schedules have no more in flight at a time.
    recomputed = checkpointed(setup.checkpoint, m)
    shared = shared_parameters(counts.low, setup.cuts, setup.lists.placement)
    peaks = []
    for d, own in enumerate(moments(setup.lists_of(m), recomputed, bool(crossings))):
        arriving = float(sum([tied.bytes for tied, devices in shared.items() if d in devices]))
        device = _Device(counts, setup, own[0].stages, crossings, arriving)
        peaks.append(device.fullest(own))
    return peaks


class _Stage:
    """The bytes of a stage's largest parameter, and of a task with and without checkpointing."""

    def __init__(self, counts: Counts, setup: Setup, s: int) -> None:
        start, stop = setup.cuts[s]
        sizes = setup.sizes
        size = sizes[0]
        recomputed = checkpointed(setup.checkpoint, len(sizes))
        # `counts.task` is slow, so it is called a second time, for tasks without checkpointing,
        # only if its result is needed.
        self.checkpointed = counts.task(size, start, stop, checkpoint=recomputed > 0)
        self.plain = self.checkpointed
        if recomputed < len(sizes) or start == 0:
            self.plain = counts.task(size, start, stop, checkpoint=False)
        self.layers = counts.low[start:stop]
        self.largest = 0.0
        for layer in self.layers:
            self.largest = max(self.largest, *layer.parameter_sizes, 0.0)
        # A backward that computes only weights' gradients needs the tensors that layers with matrix
        # products have saved, and the gradients of these layers' outputs.
        late: list[Footprint] = []
        if setup.halves:
            footprints = counts.footprints(size)[start:stop]
            for footprint, layer in zip(footprints, self.layers, strict=True):
                if layer.products:
                    late.append(footprint)
        self.output_grads = sum(footprint.output_grad for footprint in late)
        saved: dict[int, float] = {}
        for footprint in late:
            saves = footprint.saves
            saved |= {storage: size for storage, size in footprint.sizes if storage in saves}
        self.half = sum(saved.values()) + self.output_grads
        """The bytes that a task keeps until the weights' gradients are computed."""

    def stashed(self, recomputed: int, plain: int, later: int = 0) -> float:
        """Return the bytes that so many tasks in flight keep (see `InFlight`)."""
        return recomputed * self.checkpointed.inputs + plain * self.plain.kept + later * self.half


def _gradients(stages: Mapping[int, _Stage]) -> dict[int, float]:
    """Return the bytes of gradients that each stage's first backward adds on its device.

    If stages share a parameter, the last of them makes the gradient, because its backward is first.

    Args:
        stages: The stages on the device.
    """
    found = {}
    later: list[LayerCount] = []
    for s in sorted(stages, reverse=True):
        both = [*later, *stages[s].layers]
        once = counted_once(both)[len(later) :]
        found[s] = float(sum([layer.parameters for layer in once]))
        later = both
    return found


class _Device:
    """The bytes that a device holds during each action of a step.

    In GPipe's schedule, the outputs of the micro-batches are concatenated (gathered) on the last
    device. During the concatenation, that device holds the outputs twice. The caller keeps the
    gathered output until the end of the optimizer's step, and its gradient during the whole
    backward.
    """

    def __init__(
        self,
        counts: Counts,
        setup: Setup,
        own: Sequence[int],
        crossings: Crossings,
        arriving: float,
    ) -> None:
        self._setup = setup
        self._crossings = crossings
        self._copied = counts.copied
        self._gathered = setup.gathered
        self._m = len(setup.sizes)
        self._recomputed = checkpointed(setup.checkpoint, self._m)
        self._last = len(setup.balance) - 1
        self._stages = {s: _Stage(counts, setup, s) for s in own}
        layers: list[LayerCount] = []
        for stage in self._stages.values():
            layers += stage.layers
        self._sizes: list[float] = []
        """The bytes of each parameter."""
        frozen = 0.0
        for layer in counted_once(layers):
            self._sizes += layer.parameter_sizes
            frozen += layer.frozen
        if 0 in own:
            frozen += counts.input * setup.batch_size
        parameters = sum(self._sizes)
        self._parameters = parameters
        self._gradients = _gradients(self._stages)
        self._arriving = arriving
        self._kept_grads = parameters if setup.zeroed else 0.0
        """The bytes of gradients that stay between steps."""
        state = setup.optimizer.state * parameters
        self._always = DeviceBytes(parameters + frozen, self._kept_grads, state)

    def fullest(self, moments: Sequence[Moment]) -> DeviceBytes:
        """Return the bytes that the device holds when its memory is fullest.

        The memory is fullest during one of the actions in `moments`, between the forwards and the
        backwards, or during the optimizer's step.
        """
        found = [self._at(moment) for moment in moments]
        gathered = 0.0
        if self._gathered and self._last in self._stages:
            gathered = self._m * self._stages[self._last].plain.output
        stashed = 0.0
        for stage in self._stages.values():
            stashed += stage.stashed(self._recomputed, self._m - self._recomputed)
        if gathered:
            working = gathered if self._m > 1 else 0.0
            found.append(self._always._replace(stashed=stashed + gathered, working=working))
        gradients = self._parameters
        if not self._gathered:
            gradients += self._kept_grads
        update = max(self._setup.optimizer.temporaries(self._sizes), self._arriving)
        found.append(self._always._replace(gradients=gradients, stashed=gathered, update=update))
        return max(found, key=lambda each: each.peak)

    def _at(self, now: Moment) -> DeviceBytes:
        """Return the bytes that the device holds during one action."""
        running = self._stages[now.stage]
        task = running.checkpointed if now.recomputed else running.plain
        first = not now.begun[now.stages.index(now.stage)]
        backward = now.kind in ("recompute", "backward", "backward_inputs")
        gradients = self._kept_grads
        stashed = copies = 0.0
        states = zip(now.stages, now.coming, now.begun, now.held, strict=True)
        for s, coming, begun, in_flight in states:
            stage = self._stages[s]
            stashed += stage.stashed(*in_flight)
            here = backward and s == now.stage
            waiting = in_flight.checkpointed + in_flight.plain
            if s == self._last:
                stashed += self._outputs(stage.plain, now, waiting, here)
            elif self._copied:
                if here:
                    copies += stage.plain.output_grad
                if waiting and not self._gathered:  # The gradient for the next task arrives.
                    copies += stage.plain.output_grad
            if coming and s > 0:
                copies += task.inputs - task.arrivals
            if begun:
                gradients += self._gradients[s]
        if backward and not first and now.stage > 0:
            copies += task.input_grad
        return self._always._replace(
            gradients=gradients,
            stashed=stashed,
            working=self._working(now, running, task, first),
            skips=sum([self._skips(traffic) for traffic in now.skips]),
            copies=copies,
        )

    def _outputs(self, plain: TaskBytes, now: Moment, waiting: int, here: bool) -> float:
        """Return the bytes of the last stage's outputs, and of their gradients.

        Args:
            plain: The bytes that one task of the last stage takes without checkpointing.
            now: The action that is running.
            waiting: How many tasks of the last stage have run forward, but not yet backward.
            here: Whether the running action is a backward or a recomputation of the last stage.
        """
        if self._gathered and now.kind != "forward":
            return self._m * (plain.output + plain.output_grad)
        if here:
            return (waiting + 1) * plain.output + plain.output_grad
        return waiting * plain.output

    def _working(self, now: Moment, stage: _Stage, task: TaskBytes, first: bool) -> float:
        """Return the bytes that the action allocates.

        `first` is true until the action's stage has done a backward.
        """
        if now.kind == "forward":
            return task.inputs + task.forward
        if now.kind == "recompute":
            return task.inputs + task.graph
        if now.kind == "backward_weights":
            return stage.half + stage.largest
        if not self._gathered or self._last > 0 or self._recomputed:
            # Copies and checkpoints cut the autograd graph, so each task has a separate graph.
            return task.kept + stage.output_grads + (task.first if first else task.later)
        peak = task.summed
        if first:
            peak = task.later if self._setup.zeroed and self._m == 1 else task.first
        return task.kept + peak

    def _skips(self, traffic: Traffic) -> float:
        """Return the bytes of skips and of skips' gradients on their way between two stages.

        On devices that share one memory, such as the CPU, a skip is not copied. Then it counts as
        memory of the partition that computes it, and its gradient as memory of the partition that
        computes the gradient.
        """
        route = (traffic.source, traffic.target)
        found = 0.0
        for stashing, popping, skip in self._crossings:
            if route == (stashing, popping):
                found += traffic.away * skip.bytes
                if self._copied:
                    found += traffic.early * skip.grad
            elif route == (popping, stashing) and not self._copied:
                found += traffic.waiting * skip.grad
        return found
