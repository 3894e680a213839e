"""Work out each device's peak of allocated bytes: a replay of the schedule over bytes instead of seconds.

What lives on the device of partition j while it runs micro-batch i (of m, each of one size):

- always: parameters, buffers, the optimizer's state; on the first device the mini-batch;
- stashed: the inputs of checkpointed micro-batches, and what the graphs of the others keep;
- the task's working set, by the traces of its layers;
- copies under way: the next input in forward, the gradient of the output and that of the last input in backward;
- skips on their way to a later partition, and their gradients on the way back;
- the gradients, from the end of the first backward on.

Bytes are those of tensors; what an allocator reserves beyond them, and libraries' workspaces, come on top.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchgpipe.checkpoint import Mode, checkpointed
from torchgpipe.plan.count import Counts
from torchgpipe.plan.footprint import SUMMED, Change, Footprint
from torchgpipe.plan.predict import Setup

__all__ = ["Crossing", "Device", "Task", "device_memory", "find_crossings", "setup_memory", "task_bytes"]


@dataclass(frozen=True)
class Task:
    """The bytes that one micro-batch's work on one partition takes, its inputs apart unless it says so."""

    inputs: float
    """What the partition is given: copies, from the partition before and of skips; of the mini-batch, nothing new."""
    forward: float
    """Peak of a checkpointed forward."""
    graph: float
    """Peak of a forward, or recomputation, that keeps a graph."""
    kept: float
    """What the graph keeps; inputs only where they are saved, and counted here."""
    recomputed: float
    """What lives after the recomputation of a checkpointed task."""
    output: float
    """What it hands to the next partition."""
    output_grad: float
    input_grad: float
    first: float
    """Peak of a checkpointed task's backward beyond what lives when it begins, if parameters have no gradients yet."""
    later: float
    """The same, if they have."""
    first_alone: float
    """Peak of backward of a task that is not checkpointed: its graph alone holds its inputs."""
    later_alone: float
    arrivals: float
    """Of its inputs, the skips."""


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

    @property
    def peak(self) -> float:
        """The most bytes at any moment of a step, after the first step."""
        return (
            self.parameters + self.gradients + self.optimizer + self.stashed + self.working + self.skips + self.copies
        )


@dataclass(frozen=True)
class Crossing:
    """A skip between partitions: bytes of the tensor, and of its gradient."""

    source: int
    target: int
    bytes: float
    grad: float


def task_bytes(footprints: Sequence[Footprint], start: int, stop: int) -> Task:
    """Return the bytes of one micro-batch's work on the partition of layers `start` … `stop` - 1."""
    size: dict[int, float] = {}
    inputs = set(footprints[start].inputs)
    # Of the first partition they are parts of the mini-batch: they take nothing, and nobody frees them before the end.
    own = set(inputs) if start == 0 else set()
    for number, nbytes in footprints[start].sizes:
        if number in inputs:
            size[number] = 0.0 if number in own else nbytes
    saver: dict[int, int] = {}  # storage -> the first layer that saves it
    kept_beside = 0.0
    pending: set[int] = set()
    arrivals: set[int] = set()
    forward = graph = 0.0
    for index in range(start, stop):
        layer = footprints[index]
        for number, nbytes in layer.sizes:
            size.setdefault(number, nbytes)
        arriving = {number for number in layer.pops if number not in pending}
        inputs |= arriving
        arrivals |= arriving
        waiting = {*layer.inputs, *pending, *layer.pops} - inputs
        forward = max(forward, _total(waiting, size) + layer.forward)
        graph = max(graph, _total(waiting - saver.keys(), size) + kept_beside + layer.graph)
        for number in layer.saves:
            if number not in saver:
                saver[number] = index
                kept_beside += 0.0 if number in inputs else size[number]
        pending -= set(layer.pops)
        pending |= {number for _, number in layer.stashes}

    last = stop == len(footprints)

    # Like `Segment.recompute`: a single input is a leaf until backward has passed; several are left to the layers.
    leaf = inputs if len(footprints[start].inputs) + len(arrivals) == 1 else own

    def backward(trace: str, *, checkpoint: bool) -> float:
        kept = leaf if checkpoint else own
        return _backward(
            footprints, start, stop, saver, kept, trace, held=checkpoint or last, apart=checkpoint
        )

    return Task(
        inputs=_total(inputs, size),
        forward=forward,
        graph=graph,
        kept=kept_beside + _total(inputs & saver.keys(), size),
        recomputed=kept_beside + _total(inputs & (leaf | saver.keys()), size),
        output=_total(set(footprints[stop - 1].outputs), size),
        output_grad=footprints[stop - 1].output_grad,
        input_grad=footprints[start].input_grad,
        first=backward("first", checkpoint=True),
        later=backward("later", checkpoint=True),
        first_alone=backward("first", checkpoint=False),
        later_alone=backward("later", checkpoint=False),
        arrivals=_total(arrivals, size),
    )


def _total(numbers: set[int], size: dict[int, float]) -> float:
    return sum(size[number] for number in numbers)


def _backward(
    footprints: Sequence[Footprint],
    start: int,
    stop: int,
    saver: Mapping[int, int],
    inputs: set[int],
    trace: str,
    *,
    held: bool,
    apart: bool,
) -> float:
    """Return the peak of a backward through layers start … stop - 1 beyond what lives when it begins.

    `inputs` are those that are kept anyway; `held` says whether the gradients of the last layer's outputs are, too.
    `apart` says that the task has a graph of its own, and adds to the parameters' gradients in place; where all
    micro-batches share one graph, autograd makes a new sum each time.
    """
    live = most = 0.0
    for index in reversed(range(start, stop)):
        changes: Sequence[Change] = getattr(
            footprints[index], trace + ("_held" if held and index == stop - 1 else "")
        )
        for change in changes:
            number = change.storage
            if number is not None and (number in inputs or saver.get(number, index) < index):
                continue  # somebody else holds it
            if number == SUMMED and not apart:
                most = max(most, live - change.bytes)
            live += change.bytes
            if live > most:
                most = live
    return most


def device_memory(
    j: int,
    n: int,
    m: int,
    task: Task,
    checkpoint: Mode,
    *,
    crossings: Sequence[Crossing],
    parameters: float,
    frozen: float,
    state: int,
    mini_batch: float,
) -> Device:
    """Return the peak of device `j` of `n` in a step of `m` equal micro-batches, every step after the first.

    `parameters` and `frozen` are the partition's bytes, `mini_batch` the model's input's. On the last device the user
    holds the gathered output and its gradient throughout backward; gathering takes the pieces and the whole at once.
    """
    first_partition, last_partition = j == 0, j == n - 1
    output, output_grad = task.output, task.output_grad
    recomputed = checkpointed(checkpoint, m)
    leaving = [c for c in crossings if c.source == j]
    best: Device | None = None

    def consider(
        *, gradients: float, stashed: float, working: float, skips: float, copies: float
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
        )
        if best is None or found.peak > best.peak:
            best = found

    def stash(count: int) -> float:
        """Bytes held for the first `count` micro-batches."""
        return min(count, recomputed) * task.inputs + max(0, count - recomputed) * task.kept

    for i in range(m):
        under_way = sum(min(i, c.target - j) * c.bytes for c in leaving )
        pieces = i * output if last_partition else 0.0
        coming = task.inputs - task.arrivals if not first_partition and i + 1 < m else 0.0
        peak = task.forward if i < recomputed else task.graph
        consider(
            gradients=0.0,
            stashed=stash(i) + pieces,
            working=task.inputs + peak,
            skips=under_way,
            copies=coming,
        )
    outputs = m * output if last_partition else 0.0
    if last_partition:
        gathered = outputs if m > 1 else 0.0
        consider(gradients=0.0, stashed=stash(m) + outputs, working=gathered, skips=0.0, copies=0.0)
        outputs += m * output_grad
    for i in reversed(range(m)):
        first = i == m - 1
        grads = 0.0 if first else parameters
        arrived = 0.0 if last_partition else output_grad
        own = sum(c.grad for c in leaving)
        under_way = own + sum(min(i, c.target - j) * c.grad for c in leaving)
        waiting = task.input_grad if not first and not first_partition else 0.0
        held = stash(i) + outputs
        if i < recomputed:
            consider(gradients=grads, stashed=held, working=task.inputs + task.graph, skips=under_way,
                     copies=arrived + waiting)  # fmt: skip
            peak = task.recomputed + (task.first if first else task.later)
        else:
            peak = task.kept + (task.first_alone if first else task.later_alone)
        consider(gradients=grads, stashed=held, working=peak, skips=under_way, copies=arrived + waiting)
    assert best is not None
    return best


def setup_memory(counts: Counts, setup: Setup) -> list[Device]:
    """Return every device's peak. Micro-batches count as equal: as the largest, if the last is smaller."""
    layers, footprints = counts.low, counts.footprints(setup.sizes[0])
    cuts = setup.cuts
    crossings = find_crossings(footprints, cuts)
    found = []
    for j, (start, stop) in enumerate(cuts):
        task = task_bytes(footprints, start, stop)
        found.append(
            device_memory(
                j,
                len(cuts),
                len(setup.sizes),
                task,
                setup.checkpoint,
                crossings=crossings,
                parameters=sum(layer.parameters for layer in layers[start:stop]),
                frozen=sum(layer.frozen for layer in layers[start:stop]),
                state=setup.state,
                mini_batch=counts.input * setup.batch_size,
            )
        )
    return found


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
