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

Bytes are those of tensors; what an allocator reserves beyond them, libraries' workspaces, and the copies of small
buffers that checkpointed tasks make, come on top.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torchgpipe.plan.count.count import Counts
from torchgpipe.plan.count.footprint import Stashed
from torchgpipe.plan.count.task import Task, task_bytes
from torchgpipe.plan.predict import Setup, crossing
from torchgpipe.tensors.checkpoint import checkpointed

__all__ = ["Device", "setup_memory"]


@dataclass(frozen=True)
class Device:
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


def setup_memory(counts: Counts, setup: Setup) -> list[Device]:
    """Return every device's peak in each step after the first.

    Micro-batches count as equal: as the largest, if the last is smaller.
    """
    crossings = crossing(counts.footprints(setup.sizes[0]), setup.cuts)
    return [max(_moments(counts, setup, j, crossings), key=lambda x: x.peak) for j in range(len(setup.cuts))]


def _moments(counts: Counts, setup: Setup, j: int, crossings: Sequence[tuple[int, int, Stashed]]) -> Iterator[Device]:
    """Yield what device `j` holds at each moment of a step that may be its fullest.

    On the last device the user holds the gathered output and its gradient throughout backward, and the output in the
    optimizer's step; gathering takes the pieces and the whole at once.
    """
    m, n, (start, stop) = len(setup.sizes), len(setup.cuts), setup.cuts[j]
    layers, recomputed = counts.low[start:stop], checkpointed(setup.checkpoint, m)
    # Only what is needed: these take most of the time.
    twice = _task(counts, setup.sizes[0], start, stop, recomputed > 0)
    once = _task(counts, setup.sizes[0], start, stop, False) if recomputed < m or start == 0 else twice
    first_partition, last_partition = j == 0, j == n - 1
    output, output_grad = (once.output, once.output_grad) if last_partition else (0.0, 0.0)
    # Where nothing is copied or recomputed, all tasks share one graph; otherwise each has its own.
    apart = n > 1 or recomputed > 0
    leaving = [(target - j, x) for source, target, x in crossings if source == j]
    parameters = float(sum(layer.parameters for layer in layers))
    before = parameters if setup.zeroed else 0.0  # gradients that stay between steps
    frozen = sum(layer.frozen for layer in layers) + (counts.input * setup.batch_size if first_partition else 0.0)
    always = Device(parameters + frozen, before, setup.optimizer.state * parameters)

    def stash(count: int) -> float:
        """Bytes held for the first `count` micro-batches."""
        return min(count, recomputed) * twice.inputs + max(0, count - recomputed) * once.kept

    # Between these, everything grows or shrinks evenly.
    looked_at = sorted({*range(min(m, n)), *(i for i in (recomputed - 1, recomputed, m - 2, m - 1) if 0 <= i < m)})
    for i in looked_at:
        task = twice if i < recomputed else once
        yield replace(
            always,
            stashed=stash(i) + i * output,
            working=task.inputs + task.forward,
            skips=sum(min(i, far) * x.bytes for far, x in leaving),
            copies=0.0 if first_partition or i + 1 == m else task.inputs - task.arrivals,
        )
    yield replace(always, stashed=stash(m) + m * output, working=m * output if m > 1 else 0.0)
    for i in reversed(looked_at):
        task, first = twice if i < recomputed else once, i == m - 1
        if counts.copied:
            arrived = 0.0 if last_partition else once.output_grad
            under_way = sum((1 + min(i, far)) * x.grad for far, x in leaving)
        else:  # what is no copy counts where it was made
            arrived = 0.0
            under_way = sum(min(m - 1 - i, j - source) * x.grad for source, target, x in crossings if target == j)
        waiting = 0.0 if first or first_partition else task.input_grad
        held = replace(
            always,
            gradients=before + (0.0 if first else parameters),
            stashed=stash(i) + m * (output + output_grad),
            skips=under_way,
            copies=arrived + waiting,
        )
        if i < recomputed:
            yield replace(held, working=task.inputs + task.graph)
        if apart:
            peak = task.first if first else task.later
        else:
            peak = task.summed if not first else task.later if setup.zeroed and m == 1 else task.first
        yield replace(held, working=task.kept + peak)
    update = setup.optimizer.temporaries([x for layer in layers for x in layer.parameter_sizes])
    yield replace(always, gradients=parameters, stashed=m * output, update=update)


def _task(counts: Counts, size: int, start: int, stop: int, checkpoint: bool) -> Task:
    key = (size, start, stop, checkpoint)
    if key not in counts.tasks:
        footprints = counts.footprints(size)
        counts.tasks[key] = task_bytes(footprints, start, stop, checkpoint=checkpoint, copied=counts.copied)
    return counts.tasks[key]
