"""Copies between devices, on separate streams of the GPUs (torchgpipe paper, section 3.2.4).

In `model(x)`, one node of the autograd graph copies all tensors that a task sends to another
device. In `step`, which has no such graph, a program copies them (engine/program.py). Streams have
to wait until tensors are ready. For this, `StreamFence` has a method for each of these moments:

    the task ends          the source's compute stream records an event         `leave`
    the copy begins        the source's copy stream waits for that event        `hold`
    the copy ends          the target's copy stream records an event            `expect`
    the next task begins   the target's compute stream waits for that event     `arrive`

In backward, gradients are copied back in the same way. Because copies have their own streams, they
run at the same time as the computation of both devices. If a stream uses memory that was allocated
on another stream, `Tensor.record_stream` records the use, so that PyTorch does not reuse the memory
too early.

When a stream waits, all later work on the stream waits, too. To keep waits short, streams wait for
single events and not for all work of another stream. And for each pair of partitions between which
tensors are copied, `CopyPath` makes separate copy streams.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Event, Stream, Tensor

from torchgpipe.tensors import accelerator
from torchgpipe.tensors.microbatch import Flat, moved
from torchgpipe.tensors.observe import Observer, observed


class StreamFence:
    """An object that makes a task and the copies of its tensors wait for each other on a GPU.

    A task and the copies run on separate streams, which do not wait for each other by themselves. A
    fence makes a copy wait until a task has computed the tensors to copy, and makes the next task
    wait until the copy has ended. A task has two fences:

    - One is for the task's inputs, and for their gradients, which are copied back in backward.
    - The other is for the task's outputs, and for their gradients, which arrive in backward.

    The stream of the task is the one that was current on the device when the fence was made.

    Args:
        device: The device of the task. On a device without streams, a fence does nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._compute = accelerator.current_stream(device)
        self._left: Event | None = None
        self._expected: list[Event] = []

    def leave(self) -> None:
        """Record an event at the end of a task; copies of the task's outputs will wait for it."""
        if self._compute is not None:
            self._left = self._compute.record_event()

    def arrive(self, tensors: Flat) -> None:
        """Let the compute stream of the next task wait until copies have arrived.

        Args:
            tensors: The copies.
        """
        if self._compute is not None and self._expected:
            for event in self._expected:
                self._compute.wait_event(event)
            _keep(tensors, self._compute)
            self._expected.clear()

    def hold(self, stream: Stream | None, tensors: Flat) -> None:
        """Let a copy stream wait until a task has computed the tensors that are to be copied.

        Args:
            stream: The copy stream, or `None` for a device without streams.
            tensors: The tensors.
        """
        if stream is not None and self._left is not None:
            stream.wait_event(self._left)
            _keep(tensors, stream)

    def expect(self, stream: Stream | None) -> None:
        """Record an event at the end of copies on a copy stream; the next task will wait for it."""
        if stream is not None and self._compute is not None:
            self._expected.append(stream.record_event())


class CopyPath:
    """Copies tensors from the device of one partition to the device of another partition.

    Args:
        devices: The device of each partition, by the partition's index.
        source: The partition that sends.
        target: The partition that receives.
        own: Whether to make new streams for the copies on GPUs. Otherwise copies use the streams
            that are current at the time of the copy.

    Attributes:
        crosses_devices: Whether the two devices differ. If they are equal, nothing is copied.
    """

    def __init__(
        self, devices: Mapping[int, torch.device], source: int, target: int, *, own: bool = True
    ) -> None:
        self._ends = source, target
        self._devices = devices[source], devices[target]
        self.crosses_devices = devices[source] != devices[target]
        self._own: list[Stream | None] = [None, None]
        if own and self.crosses_devices:
            self._own = [accelerator.new_stream(device) for device in self._devices]

    def copy(
        self,
        tensors: Flat,
        i: int,
        fences: tuple[StreamFence, StreamFence],
        tie: Tensor | None = None,
        observer: Observer | None = None,
    ) -> Flat:
        """Copy tensors to the target's device, as a single node of the autograd graph.

        The backward of this node copies the gradients back.

        Args:
            tensors: The tensors to copy.
            i: The index of the micro-batch.
            fences: Two `StreamFence`s, which synchronize the streams: the fence of the sending
                task's outputs, and the fence of the receiving task's inputs.
            tie: An extra input of the node, which only orders the backward: the task that made this
                tensor goes backward after the backward of this copy.
            observer: The observer of the mini-batch, such as a timer of all tasks.
        """
        if not self.crosses_devices:
            return tensors
        streams = self._streams()
        with accelerator.using(*streams):
            forth = partial(self.move, i, fences, observer)
            back = partial(self.move, i, fences[::-1], observer, back=True)
            return cast(Flat, _Copy.apply(forth, back, streams, tie, *tensors))

    def send(
        self,
        tensors: Flat,
        i: int,
        fences: tuple[StreamFence, StreamFence],
        observer: Observer | None = None,
    ) -> Flat:
        """Copy tensors to the target's device, outside of autograd.

        Args:
            tensors: The tensors to copy.
            i: The index of the micro-batch.
            fences: As for `copy`.
            observer: The observer of the mini-batch, such as a timer of all tasks.
        """
        if not self.crosses_devices:
            return tensors
        with accelerator.using(*self._streams()):
            return self.move(i, fences, observer, tensors)

    def _streams(self) -> list[Stream | None]:
        """Return the streams for a copy: one of the source's device, and one of the target's."""
        streams = []
        for own, device in zip(self._own, self._devices, strict=True):
            streams.append(own or accelerator.current_stream(device))
        return streams

    def move(
        self,
        i: int,
        fences: tuple[StreamFence, StreamFence],
        observer: Observer | None,
        tensors: Flat,
        *,
        back: bool = False,
    ) -> Flat:
        """Copy tensors to the target's device on the current streams, outside of autograd.

        A copy to the CPU has ended when this method returns.

        Args:
            i: The index of the micro-batch.
            fences: Two `StreamFence`s, which synchronize the streams: the fence of the task from
                which the tensors come, and the fence of the task to which they go.
            observer: The observer of the mini-batch, such as a timer of all tasks.
            tensors: The tensors to copy.
            back: Whether to copy gradients from the target back to the source.
        """
        here, there = (1, 0) if back else (0, 1)
        outputs_fence, inputs_fence = fences
        outputs_fence.hold(self._own[here], tensors)
        device = self._devices[there]
        # The host can read a copy on the CPU at once, so it must have arrived. The host can also
        # overwrite a pinned tensor as soon as a call of the pipeline has returned.
        runs_later = all(accelerator.current_stream(each) is not None for each in self._devices)
        with observed(observer, "copy", i, self._ends[here]):
            copies = moved(tensors, device, non_blocking=runs_later)
        inputs_fence.expect(self._own[there])
        return copies


_GIVEN = 4
"""How many arguments of `_Copy` come before the tensors."""


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, forth: Any, back: Any, streams: Any, tie: Tensor | None, *tensors: Tensor | None
    ) -> Flat:
        ctx.set_materialize_grads(False)
        ctx.back, ctx.streams = back, streams
        copies: Flat = forth(tensors)
        needs = ctx.needs_input_grad[_GIVEN:]
        constants = []
        for y, needed in zip(copies, needs, strict=True):
            if y is not None and not needed:
                constants.append(y)
        ctx.mark_non_differentiable(*constants)
        return copies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        nothing = (None,) * _GIVEN
        if all(grad is None for grad in grads):
            return (*nothing, *grads)
        with accelerator.using(*ctx.streams):
            return (*nothing, *ctx.back(grads))


def _keep(tensors: Flat, stream: Stream) -> None:
    """Tell PyTorch not to reuse the memory of tensors before a stream has done its present work.

    Args:
        tensors: The tensors. Only tensors on a GPU matter.
        stream: A stream of the GPU that uses the tensors.
    """
    for x in tensors:
        if x is not None and x.device.type == stream.device.type:
            x.record_stream(stream)


NO_FENCE = StreamFence(torch.device("cpu"))
"""A fence that does nothing, for tasks that need no synchronization of streams."""
