"""Work out each device's peak of allocated bytes: a replay of the schedule over bytes instead of seconds.

What lives on the device of partition j while it runs micro-batch i (of m, each of one size):

- always: parameters, buffers, the optimizer's state; on the first device the mini-batch;
- stashed: the inputs of checkpointed micro-batches, and what the graphs of the others keep;
- the task's working set, by the traces of its layers;
- copies under way: the next input in forward, the gradient of the output and that of the last input in backward;
- skips on their way to a later partition, and their gradients on the way back;
- the gradients: the sum of this step's, from the end of the first backward on, and those that stay between steps;
- in the optimizer's step, after the last backward, what it makes for itself (`optimizer`).

CPU devices share their memory, so that nothing is copied: there a tensor counts once, on one of them.

Bytes are those of tensors; what an allocator reserves beyond them, libraries' workspaces, and the copies of
buffers that checkpointed tasks make, come on top.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torchgpipe.plan.count.count import Counts
from torchgpipe.plan.count.footprint import Stashed
from torchgpipe.plan.count.task_bytes import TaskBytes
from torchgpipe.plan.predict import Setup, crossing
from torchgpipe.tensors.checkpoint import checkpointed


@dataclass(frozen=True)
class DeviceBytes:
    """A device's peak of allocated bytes, and its parts at that moment."""

    parameters: float
    gradients: float
    optimizer: float
    stashed: float = 0.0
    working: float = 0.0
    skips: float = 0.0
    copies: float = 0.0
    update: float = 0.0
    """What the optimizer's step makes, where that is the fullest moment."""

    @property
    def peak(self) -> float:
        """The most bytes at any moment of a step, after the first step."""
        model = self.parameters + self.gradients + self.optimizer + self.update
        return model + self.stashed + self.working + self.skips + self.copies


def setup_memory(counts: Counts, setup: Setup) -> list[DeviceBytes]:
    """Return every device's peak in each step after the first.

    Micro-batches count as equal: as the largest, if the last is smaller.
    """
    crossings = crossing(counts.footprints(setup.sizes[0]), setup.cuts)
    devices = (_DeviceStep(counts, setup, j, crossings) for j in range(len(setup.cuts)))
    return [max(device.moments(), key=lambda x: x.peak) for device in devices]


class _DeviceStep:
    """What device `j` holds in a step, moment by moment.

    On the last device the user holds the gathered output, also during the optimizer's step, and its gradient throughout
    backward. While outputs are gathered, the micro-batches' outputs and the whole are there at once.
    """

    def __init__(self, counts: Counts, setup: Setup, j: int, crossings: Sequence[tuple[int, int, Stashed]]) -> None:
        self._counts, self._setup, self._j, self._crossings = counts, setup, j, crossings
        self._m, self._n = len(setup.sizes), len(setup.cuts)
        self._first, self._last = j == 0, j == self._n - 1
        start, stop = setup.cuts[j]
        layers, self._recomputed = counts.low[start:stop], checkpointed(setup.checkpoint, self._m)
        # Bytes of a checkpointed task and of a plain one. Only what is needed is worked out: it takes most of the time.
        size = setup.sizes[0]
        self._checkpointed = counts.task(size, start, stop, checkpoint=self._recomputed > 0)
        plain = self._recomputed < self._m or start == 0
        self._plain = counts.task(size, start, stop, checkpoint=False) if plain else self._checkpointed
        output = (self._plain.output, self._plain.output_grad) if self._last else (0.0, 0.0)
        self._output, self._output_grad = output
        self._parameters = float(sum(layer.parameters for layer in layers))
        self._kept_grads = self._parameters if setup.zeroed else 0.0  # gradients that stay between steps
        self._update = setup.optimizer.temporaries([x for layer in layers for x in layer.parameter_sizes])
        given = counts.input * setup.batch_size if self._first else 0.0
        frozen = sum(layer.frozen for layer in layers) + given
        optimizer = setup.optimizer.state * self._parameters
        self._always = DeviceBytes(self._parameters + frozen, self._kept_grads, optimizer)

    def moments(self) -> Iterator[DeviceBytes]:
        """Yield what the device holds at each moment that may be its fullest."""
        m, n, last = self._m, self._n, self._recomputed - 1  # the last one that is recomputed
        # Between these micro-batches, everything grows or shrinks evenly.
        looked_at = sorted({*range(min(m, n)), *(i for i in (last, last + 1, m - 2, m - 1) if 0 <= i < m)})
        yield from map(self._forward, looked_at)
        gathered = m * self._output
        yield replace(self._always, stashed=self._stashed(m) + gathered, working=gathered if m > 1 else 0.0)
        for i in reversed(looked_at):
            yield from self._backward(i)
        yield replace(self._always, gradients=self._parameters, stashed=gathered, update=self._update)

    def _task(self, i: int) -> TaskBytes:
        return self._checkpointed if i < self._recomputed else self._plain

    def _stashed(self, count: int) -> float:
        """Return the bytes held for the first `count` micro-batches."""
        recomputed = min(count, self._recomputed)
        return recomputed * self._checkpointed.inputs + (count - recomputed) * self._plain.kept

    def _forward(self, i: int) -> DeviceBytes:
        task = self._task(i)
        leaving = [(target - self._j, x) for source, target, x in self._crossings if source == self._j]
        return replace(
            self._always,
            stashed=self._stashed(i) + i * self._output,
            working=task.inputs + task.forward,
            skips=sum(min(i, far) * x.bytes for far, x in leaving),
            copies=0.0 if self._first or i + 1 == self._m else task.inputs - task.arrivals,
        )

    def _backward(self, i: int) -> Iterator[DeviceBytes]:
        """Yield the moments of micro-batch i's recomputation, if there is one, and of its backward."""
        task, begins = self._task(i), i == self._m - 1  # backward begins with the last micro-batch
        held = replace(
            self._always,
            gradients=self._kept_grads + (0.0 if begins else self._parameters),
            stashed=self._stashed(i) + self._m * (self._output + self._output_grad),
            skips=self._skip_grads(i),
            copies=self._grads_under_way(task, begins),
        )
        if i < self._recomputed:
            yield replace(held, working=task.inputs + task.graph)
        # Tasks have graphs of their own if there are copies or recomputation. If not, all share one graph.
        if self._n > 1 or self._recomputed > 0:
            peak = task.first if begins else task.later
        elif begins:
            peak = task.later if self._setup.zeroed and self._m == 1 else task.first
        else:
            peak = task.summed
        yield replace(held, working=task.kept + peak)

    def _skip_grads(self, i: int) -> float:
        """Return the bytes of skips' gradients that are on this device during micro-batch i's backward."""
        j = self._j
        if self._counts.copied:
            return sum((1 + min(i, target - j)) * x.grad for source, target, x in self._crossings if source == j)
        # A gradient that is not copied counts on the device that made it.
        waiting = self._m - 1 - i
        return sum(min(waiting, j - source) * x.grad for source, target, x in self._crossings if target == j)

    def _grads_under_way(self, task: TaskBytes, begins: bool) -> float:
        """Return the bytes of copies: the gradient of the output, and that of the last input, which is on its way."""
        arrived = self._plain.output_grad if self._counts.copied and not self._last else 0.0
        return arrived + (0.0 if begins or self._first else task.input_grad)
