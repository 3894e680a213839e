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

from collections.abc import Sequence
from dataclasses import dataclass

from torchgpipe.checkpoint import Mode, checkpointed
from torchgpipe.plan.count import Counts
from torchgpipe.plan.footprint import Footprint
from torchgpipe.plan.predict import Setup
from torchgpipe.plan.task import Task, task_bytes

__all__ = ["Crossing", "Device", "device_memory", "find_crossings", "setup_memory"]


@dataclass(frozen=True)
class Device:
    """A device's peak of allocated bytes, and its parts at that moment."""

    parameters: float
    gradients: float
    optimizer: float
    stashed: float
    working: float
    skips: float
    copies: float
    update: float = 0.0
    """What the optimizer's step makes, where that is the fullest moment."""

    @property
    def peak(self) -> float:
        """The most bytes at any moment of a step, after the first step."""
        model = self.parameters + self.gradients + self.optimizer + self.update
        return model + self.stashed + self.working + self.skips + self.copies


@dataclass(frozen=True)
class Crossing:
    """A skip between partitions: bytes of the tensor, and of its gradient."""

    source: int
    target: int
    bytes: float
    grad: float


def device_memory(
    j: int,
    n: int,
    m: int,
    once: Task,
    twice: Task,
    checkpoint: Mode,
    *,
    crossings: Sequence[Crossing],
    parameters: float,
    frozen: float,
    state: float,
    update: float,
    mini_batch: float,
    zeroed: bool,
    copied: bool = True,
) -> Device:
    """Return the peak of device `j` of `n` in a step of `m` equal micro-batches, every step after the first.

    `once` is a task that is not checkpointed, `twice` one that is.
    `parameters` and `frozen` are the partition's bytes, `state` the optimizer's for each of the former, `update` what
    its step makes, `mini_batch` the model's input's; `zeroed` as in `Setup`, `copied` as in
    `Counts`. On the last device the user holds the gathered output and its gradient throughout backward, and the output
    in the optimizer's step; gathering takes the pieces and the whole at once.
    """
    first_partition, last_partition = j == 0, j == n - 1
    output, output_grad = once.output, once.output_grad
    recomputed = checkpointed(checkpoint, m)
    # Where nothing is copied or recomputed, all tasks share one graph; otherwise each has its own.
    apart = n > 1 or recomputed > 0
    leaving = [c for c in crossings if c.source == j]
    before = parameters if zeroed else 0.0  # gradients that stay between steps
    best: Device | None = None

    def consider(
        *, gradients: float, stashed: float, working: float, skips: float, copies: float, update: float = 0.0
    ) -> None:
        nonlocal best
        found = Device(
            parameters=parameters + frozen + (mini_batch if first_partition else 0.0),
            gradients=gradients,
            optimizer=state * parameters,
            stashed=stashed,
            working=working,
            skips=skips,
            copies=copies,
            update=update,
        )
        if best is None or found.peak > best.peak:
            best = found

    def stash(count: int) -> float:
        """Bytes held for the first `count` micro-batches."""
        return min(count, recomputed) * twice.inputs + max(0, count - recomputed) * once.kept

    # Between these, everything grows or shrinks evenly.
    looked_at = sorted({*range(min(m, n)), *(i for i in (recomputed - 1, recomputed, m - 2, m - 1) if 0 <= i < m)})
    for i in looked_at:
        task = twice if i < recomputed else once
        under_way = sum(min(i, c.target - j) * c.bytes for c in leaving)
        pieces = i * output if last_partition else 0.0
        coming = task.inputs - task.arrivals if not first_partition and i + 1 < m else 0.0
        consider(
            gradients=before,
            stashed=stash(i) + pieces,
            working=task.inputs + task.forward,
            skips=under_way,
            copies=coming,
        )
    outputs = m * output if last_partition else 0.0
    if last_partition:
        gathered = outputs if m > 1 else 0.0
        consider(gradients=before, stashed=stash(m) + outputs, working=gathered, skips=0.0, copies=0.0)
        outputs += m * output_grad
    for i in reversed(looked_at):
        task, first = twice if i < recomputed else once, i == m - 1
        grads = before + (0.0 if first else parameters)
        if copied:
            arrived = 0.0 if last_partition else output_grad
            under_way = sum((1 + min(i, c.target - j)) * c.grad for c in leaving)
        else:  # what is no copy counts where it was made
            arrived = 0.0
            under_way = sum(min(m - 1 - i, j - c.source) * c.grad for c in crossings if c.target == j)
        waiting = task.input_grad if not first and not first_partition else 0.0
        held = stash(i) + outputs
        if i < recomputed:
            consider(gradients=grads, stashed=held, working=task.inputs + task.graph, skips=under_way,
                     copies=arrived + waiting)  # fmt: skip
        if apart:
            peak = task.first if first else task.later
        else:
            peak = task.summed if not first else task.later if zeroed and m == 1 else task.first
        consider(gradients=grads, stashed=held, working=task.kept + peak, skips=under_way, copies=arrived + waiting)
    held = m * output if last_partition else 0.0
    consider(gradients=parameters, stashed=held, working=0.0, skips=0.0, copies=0.0, update=update)
    assert best is not None
    return best


def setup_memory(counts: Counts, setup: Setup) -> list[Device]:
    """Return every device's peak. Micro-batches count as equal: as the largest, if the last is smaller."""
    cuts = setup.cuts
    crossings = find_crossings(counts.footprints(setup.sizes[0]), cuts)
    return [_device(counts, setup, j, len(cuts), crossings, *ends) for j, ends in enumerate(cuts)]


def _device(
    counts: Counts, setup: Setup, j: int, n: int, crossings: Sequence[Crossing], start: int, stop: int
) -> Device:
    m, layers = len(setup.sizes), counts.low[start:stop]
    recomputed = checkpointed(setup.checkpoint, m)
    # Only what is needed: these take most of the time.
    once = _task(counts, setup.sizes[0], start, stop, False) if recomputed < m or start == 0 else None
    twice = _task(counts, setup.sizes[0], start, stop, True) if recomputed else once
    assert twice is not None
    return device_memory(
        j,
        n,
        m,
        once or twice,
        twice,
        setup.checkpoint,
        crossings=crossings,
        parameters=sum(layer.parameters for layer in layers),
        frozen=sum(layer.frozen for layer in layers),
        state=setup.optimizer.state,
        update=setup.optimizer.temporaries([x for layer in layers for x in layer.parameter_sizes]),
        mini_batch=counts.input * setup.batch_size,
        zeroed=setup.zeroed,
        copied=counts.copied,
    )


def _task(counts: Counts, size: int, start: int, stop: int, checkpoint: bool) -> Task:
    key = (size, start, stop, checkpoint)
    if key not in counts.tasks:
        footprints = counts.footprints(size)
        counts.tasks[key] = task_bytes(footprints, start, stop, checkpoint=checkpoint, copied=counts.copied)
    return counts.tasks[key]


def find_crossings(footprints: Sequence[Footprint], cuts: Sequence[tuple[int, int]]) -> list[Crossing]:
    """List the skips that go from one partition to another."""
    target = {number: j for j, (a, b) in enumerate(cuts) for layer in footprints[a:b] for number in layer.pops}
    found = []
    for j, (a, b) in enumerate(cuts):
        for layer in footprints[a:b]:
            sizes = dict(layer.sizes)
            for (_, number), grad in zip(layer.stashes, layer.stash_grads, strict=True):
                if target[number] != j:
                    found.append(Crossing(j, target[number], sizes[number], grad))
    return found
