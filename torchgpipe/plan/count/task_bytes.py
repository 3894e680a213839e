"""Add up what layers hold to what one micro-batch's work on a partition takes."""

from collections.abc import Sequence
from dataclasses import dataclass

from torchgpipe.plan.count.footprint import SUMMED, Footprint


@dataclass(frozen=True)
class TaskBytes:
    """The bytes that one micro-batch's work on one partition takes, its inputs apart unless it says so.

    Of a task that is checkpointed, or of one that is not.
    """

    inputs: float
    """What the partition is given: copies, from the partition before and of skips; of the mini-batch, nothing new."""
    forward: float
    """Peak of its forward."""
    graph: float
    """Peak of its forward or recomputation, whichever builds the graph."""
    kept: float
    """What lives once the graph is there; inputs only where they are saved, and counted here."""
    output: float
    """What it hands to the next partition."""
    output_grad: float
    input_grad: float
    first: float
    """Peak of its backward beyond what lives when it begins, if there are no gradients of parameters to add to."""
    later: float
    """The same, if there are."""
    summed: float
    """The same, where all micro-batches share one graph, and autograd makes a new sum of gradients each time."""
    arrivals: float
    """Of its inputs, the skips."""


def task_bytes(
    footprints: Sequence[Footprint], start: int, stop: int, *, checkpoint: bool, copied: bool = True
) -> TaskBytes:
    """Return the bytes of one micro-batch's work on the partition of layers `start` … `stop` - 1.

    `copied` says that it gets copies of what other partitions hand it. If not, what the graphs of those before keep is
    counted there.
    """
    inputs = set(footprints[start].inputs)
    cloned = checkpoint and len(inputs) == 1 and _begins_in_place(footprints[start:stop])
    # What others hold takes nothing, and nobody frees it before the end: for the first partition the mini-batch.
    others: set[int] = set(inputs) if start == 0 and not cloned else set()
    if not copied and not checkpoint:
        others |= {number for layer in footprints[:start] for number in layer.saves}
    size = dict.fromkeys(others, 0.0)
    # Beside the inputs, for as long as the layers run.
    copy = _total(inputs, dict(footprints[start].sizes)) if cloned else 0.0
    saver: dict[int, int] = {}  # storage -> the first layer that saves it
    kept_beside = 0.0
    pending: set[int] = set()
    arrivals: set[int] = set()
    forward = graph = 0.0
    for index in range(start, stop):
        layer = footprints[index]
        for number, nbytes in layer.sizes:
            size.setdefault(number, nbytes)
        arriving = set(layer.pops) - pending
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
        pending |= {stashed.skip for stashed in layer.stashes}

    def backward(*, later: bool, apart: bool = True) -> float:
        """Return the peak of a backward beyond what lives when it begins, `later` with gradients to add to.

        `apart` says that the task has a graph of its own, and adds to the parameters' gradients in place; where all
        micro-batches share one graph, autograd makes a new sum each time.
        """
        live = most = 0.0
        held = True  # whoever asks for a backward holds the gradients that it starts from
        for index in reversed(range(start, stop)):
            layer = footprints[index]
            if held and not layer.traces[0]:
                continue  # it hands them on
            trace = layer.traces[later + 2 * held]
            held = False
            for change in trace:
                number = change.storage
                if number is not None and (number in others or saver.get(number, index) < index):
                    continue  # somebody else holds it
                if number == SUMMED and not apart:
                    most = max(most, live - change.bytes)
                live += change.bytes
                if live > most:
                    most = live
        return most

    return TaskBytes(
        inputs=0.0 if start == 0 else _total(inputs, size),
        forward=copy + (forward if checkpoint else graph),
        graph=copy + graph,
        kept=kept_beside + _total(inputs & (others | saver.keys()), size),
        output=_total(set(footprints[stop - 1].outputs), size),
        output_grad=footprints[stop - 1].output_grad,
        input_grad=footprints[start].input_grad,
        first=backward(later=False),
        later=backward(later=True),
        summed=backward(later=True, apart=False),
        arrivals=_total(arrivals, size),
    )


def _begins_in_place(footprints: Sequence[Footprint]) -> bool:
    """Return whether the first layer that does more than hand on its input changes it."""
    for layer in footprints:
        if layer.in_place or layer.outputs != layer.inputs:
            return layer.in_place
    return False


def _total(numbers: set[int], size: dict[int, float]) -> float:
    return sum(size[number] for number in numbers)
