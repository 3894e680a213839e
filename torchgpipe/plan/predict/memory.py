"""Predict the peak memory of each device during a training step.

Each device has a list of actions: forwards, recomputations and backwards. The prediction adds up
the bytes of tensors on the device during each action, and returns the largest sum. It assumes that
all micro-batches have the same size. These tensors are on a device during an action:

- always: the parameters, the buffers and the optimizer's state. The device of the first stage also
  has the mini-batch. A parameter that several layers share counts once on each device that has one
  of these layers;
- stashed: the tensors that tasks keep from their forward to their backward. A checkpointed task
  keeps its inputs. A task without checkpointing keeps the tensors that its autograd graph has
  saved. If a backward is split into halves, a task keeps the tensors that its weights' gradients
  need until these gradients are computed;
- working: the tensors that the action itself allocates, from the footprints of its layers. If a
  criterion was given, the loss and its backward allocate tensors, too: with GPipe's schedule once
  for the whole mini-batch, after all forwards, and otherwise for each micro-batch, after its
  forward on the last stage. What autograd saves for a loss's backward counts as stashed;
- copies: tensors that are being copied between devices. These are the next task's input, the
  gradient of this task's output, and the gradient of the previous task's input;
- skips: the skips between two stages, and their gradients on the way back;
- gradients: the parameters' gradients, from the end of the step's first backward on, or always if
  they stay allocated between steps;
- update: the tensors that the optimizer's step allocates after the last backward (see `optimizer`).
  If devices share parameters, they exchange the gradients before that step. If the gradients that
  arrive need more memory than the step, `update` is their memory instead.

CPU devices share their memory, so nothing is copied between them. If several of them use a tensor,
it counts on only one of them.

The prediction leaves out some memory: what an allocator reserves beyond the tensors, the workspaces
of libraries such as cuDNN, and the copies of buffers that checkpointed tasks make.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torchgpipe.plan.count.count import Counts
from torchgpipe.plan.count.task_bytes import NO_TASK, TaskBytes
from torchgpipe.plan.predict.between import crossing, exchanged_parameters
from torchgpipe.plan.predict.moments import Moment, Traffic, moments
from torchgpipe.plan.predict.setup import Setup
from torchgpipe.plan.predict.stages import HeldBytes, Routes, StageBytes, routes_of
from torchgpipe.tensors.checkpoint import checkpointed

WITH_LOSS = "forward", "backward", "backward_inputs"
"""The actions of the last stage during which a loss, or the backward of a loss, is computed."""


class DeviceBytes(NamedTuple):
    """The bytes that a device has allocated when its memory is fullest, for each purpose.

    Purposes are, for example, parameters, gradients and the optimizer's state.
    """

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
        """The peak memory of the device in bytes, for all purposes together."""
        return sum(self)


def setup_memory(counts: Counts, setup: Setup) -> list[DeviceBytes]:
    """Predict the peak memory of every device in a training step with a setup.

    The prediction is for a step after the first, when the optimizer's state exists.

    All micro-batches are taken to be as large as the first one, although the last can be smaller.
    """
    return list(peaks_of_devices(counts, setup))


def peaks_of_devices(counts: Counts, setup: Setup) -> Iterator[DeviceBytes]:
    """Yield the items of `setup_memory`: the predicted peak memory of one device after another.

    The caller can stop early, to save the time of predicting the remaining devices.
    """
    sizes = setup.sizes
    routes = routes_of(crossing(counts.skips(sizes[0]), setup.cuts))
    m = len(sizes)
    if isinstance(setup.schedule, str) and not setup.gathered:
        # No named schedule but GPipe's has more than four micro-batches per stage in flight.
        m = min(m, 4 * len(setup.balance))
    recomputed = checkpointed(setup.checkpoint, m)
    shared = exchanged_parameters(counts.low, setup.cuts, setup.full_schedule.placement)
    schedule = setup.full_schedule_of(m)
    for d, device_moments in enumerate(moments(schedule, recomputed, bool(routes))):
        arriving = float(sum([tied.bytes for tied, devices in shared.items() if d in devices]))
        device = _Device(counts, setup, device_moments, routes, arriving)
        yield device.fullest(device_moments)


class _Device:
    """Add up the bytes that tensors take on one device, during each action of a step.

    In GPipe's schedule, the outputs of all micro-batches are concatenated on the last device, which
    then has them twice for a moment. The caller of the pipeline keeps the concatenated output until
    the end of the optimizer's step, and its gradient during the whole backward.
    """

    def __init__(
        self,
        counts: Counts,
        setup: Setup,
        device_moments: Sequence[Moment],
        routes: Routes,
        arriving: float,
    ) -> None:
        own = device_moments[0].stages
        self._setup = setup
        self._copied = counts.copied
        self._gathered = setup.gathered
        self._m = len(setup.sizes)
        self._recomputed = checkpointed(setup.checkpoint, self._m)
        self._last = len(setup.balance) - 1
        self._stages = {s: StageBytes.of(counts, setup, s) for s in own}
        self._whole_loss = counts.loss_task(setup.batch_size)
        # With GPipe's schedule, no micro-batch has a loss of its own.
        self._several_losses = counts.loss is not None and not self._gathered
        self._loss = counts.loss_task(setup.sizes[0]) if self._several_losses else NO_TASK
        self._held = HeldBytes.of(counts, setup.cuts, own)
        frozen = self._held.frozen
        if 0 in own:
            frozen += counts.inputs(setup.batch_size)
        parameters = sum(self._held.sizes)
        self._parameters = parameters
        self._traffic = self._skips(device_moments[0].skips, routes)
        self._arriving = arriving
        self._kept_grads = parameters if setup.zeroed else 0.0
        """The bytes of gradients that stay between steps."""
        state = setup.optimizer.state * parameters
        self._always = DeviceBytes(parameters + frozen, self._kept_grads, state)

    def fullest(self, device_moments: Sequence[Moment]) -> DeviceBytes:
        """Return the bytes that tensors take on the device when its memory is fullest.

        The memory is fullest during one of the actions in `device_moments`, between the last
        forward and the first backward, or during the optimizer's step.
        """
        found = [self._at(moment) for moment in device_moments]
        if self._several_losses:
            at_last = [moment for moment in device_moments if moment.stage == self._last]
            found += [self._in_loss(moment) for moment in at_last if moment.kind in WITH_LOSS]
        gathered = 0.0
        if self._gathered and self._last in self._stages:
            gathered = self._m * self._stages[self._last].plain.output
        stashed = 0.0
        for stage in self._stages.values():
            stashed += stage.stashed(self._recomputed, self._m - self._recomputed)
        if gathered:
            whole = self._whole_loss
            concatenated = gathered if self._m > 1 else 0.0
            working = max(concatenated, whole.graph, whole.kept + whole.first)
            found.append(self._always._replace(stashed=stashed + gathered, working=working))
        gradients = 0.0 if self._setup.scattered else self._parameters
        if not self._gathered:
            gradients += self._kept_grads
        update = max(self._setup.optimizer.temporaries(self._held.sizes), self._arriving)
        found.append(self._always._replace(gradients=gradients, stashed=gathered, update=update))
        return max(found, key=lambda each: each.peak)

    def _at(self, now: Moment) -> DeviceBytes:
        """Return the bytes that tensors take on the device during the action `now`."""
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
            if begun and not self._setup.scattered:
                gradients += self._held.gradients[s]
        if backward and not first and now.stage > 0:
            copies += task.input_grad
        skips = 0.0
        for index, away_bytes, early_bytes, waiting_bytes in self._traffic:
            traffic = now.skips[index]
            skips += traffic.away * away_bytes
            skips += traffic.early * early_bytes
            skips += traffic.waiting * waiting_bytes
        return self._always._replace(
            gradients=gradients,
            stashed=stashed,
            working=self._working(now, running, task, first),
            skips=skips,
            copies=copies,
        )

    def _in_loss(self, now: Moment) -> DeviceBytes:
        """Return the bytes on the last stage's device while a micro-batch's loss is computed.

        The loss is computed at the end of the last stage's forward, and its backward runs at the
        beginning of the last stage's backward.

        Args:
            now: The forward or backward of the last stage.
        """
        found, loss = self._at(now), self._loss
        stage = self._stages[self._last]
        plain = stage.plain
        task = stage.checkpointed if now.recomputed else plain
        if now.kind == "forward":
            kept = task.inputs if now.recomputed else task.kept
            return found._replace(working=kept + plain.output + loss.graph)
        # `found` counts the output's gradient, which the backward of the loss makes, too.
        working = task.kept + loss.kept + loss.first - plain.output_grad
        return found._replace(working=working)

    def _outputs(self, plain: TaskBytes, now: Moment, waiting: int, here: bool) -> float:
        """Return the bytes of the last stage's outputs, losses and gradients during an action.

        Args:
            plain: The bytes of one task of the last stage (one micro-batch), without checkpointing.
            now: The action that is running.
            waiting: How many tasks of the last stage have run forward, but not yet backward.
            here: Whether the running action is a backward or a recomputation of the last stage.
        """
        if self._gathered and now.kind != "forward":
            return self._m * (plain.output + plain.output_grad)
        kept = waiting * (plain.output + self._loss.kept)
        if not here:
            return kept
        if now.kind == "recompute":
            kept += self._loss.kept
        return kept + plain.output + plain.output_grad

    def _working(self, now: Moment, stage: StageBytes, task: TaskBytes, first: bool) -> float:
        """Return the bytes of the tensors that an action itself allocates.

        Args:
            now: The action.
            stage: The bytes of the action's stage.
            task: The bytes of the action's task.
            first: Whether the stage has not done a backward yet in this step.
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

    def _skips(
        self, skips: Sequence[Traffic], routes: Routes
    ) -> list[tuple[int, float, float, float]]:
        """Return the bytes that skips and their gradients take on their way between stages.

        CPU devices share one memory, so a skip is not copied between them. The skip counts on the
        device of the partition that computes it. Its gradient counts on the device of the partition
        that computes the gradient.

        Args:
            skips: For each pair of stages, how many micro-batches have a skip or a gradient on its
                way between them. Only the fields `source` and `target` are used here.
            routes: For each pair of stages, the bytes of all skips, and of their gradients.

        Returns:
            A tuple for each entry of `skips` that takes memory on this object's device. The first
            item is the entry's index. The other three are the bytes of a micro-batch whose skip has
            left, of one whose gradient has come early, and of one that waits (see `Traffic`).
        """
        found = []
        for index, traffic in enumerate(skips):
            there = routes.get((traffic.source, traffic.target))
            back = routes.get((traffic.target, traffic.source))
            if there is not None:
                nbytes, grad = there
                found.append((index, nbytes, grad if self._copied else 0.0, 0.0))
            elif back is not None and not self._copied:
                found.append((index, 0.0, 0.0, back[1]))
        return found
