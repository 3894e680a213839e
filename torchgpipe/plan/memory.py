"""Work out each device's peak of allocated bytes: a walk over its list of actions, with bytes instead of seconds.

What lives on a device during an action, with micro-batches of one size:

- always: parameters, buffers, the optimizer's state; on the first stage's device the mini-batch;
- stashed: of its tasks in flight the inputs of those that are checkpointed, what the graphs of the others keep, and
  what the backward of weights needs of those that wait for it;
- the action's working set, by the traces of its layers;
- copies under way: the next input, the gradient of the output, and that of the last input;
- skips on their way to a later stage, and their gradients on the way back;
- the gradients: the sum of this step's, from the end of the first backward on, and those that stay between steps;
- in the optimizer's step, after the last backward, what it makes for itself (`optimizer`).

CPU devices share their memory, so that nothing is copied: there a tensor counts once, on one of them.

Bytes are those of tensors; what an allocator reserves beyond them, libraries' workspaces, what a criterion keeps, and
the copies of buffers that checkpointed tasks make, come on top.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from torchgpipe.plan.count.count import Counts
from torchgpipe.plan.count.footprint import Stashed
from torchgpipe.plan.predict import Setup, crossing
from torchgpipe.schedules import Kind, Schedule
from torchgpipe.schedules.replay import units
from torchgpipe.tensors.checkpoint import checkpointed


class DeviceBytes(NamedTuple):
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
        return sum(self)


def setup_memory(counts: Counts, setup: Setup) -> list[DeviceBytes]:
    """Return every device's peak in each step after the first.

    Micro-batches count as equal: as the largest, if the last is smaller.
    """
    crossings = crossing(counts.footprints(setup.sizes[0]), setup.cuts)
    m = len(setup.sizes)
    if isinstance(setup.schedule, str) and not setup.gathered:
        m = min(m, 4 * len(setup.balance))  # of more, no more are in flight
    moments = _moments(setup.lists_of(m), checkpointed(setup.checkpoint, m), bool(crossings))
    return [_Device(counts, setup, own[0].stages, crossings).fullest(own) for own in moments]


class Moment(NamedTuple):
    """What a device does, and what it holds then.

    `stages` are the device's; of each, `coming` says whether it goes forward again, `begun` whether it has gone
    backward, and `held` how many tasks beside this one are in flight: checkpointed ones, plain ones, and those that
    wait for the backward of weights. For each of them and each stage of all, `skips` are those on their way from here;
    gradients of such that have come before their time; and gradients made here that are still to be taken.
    """

    kind: Kind
    stage: int
    recomputed: bool
    stages: tuple[int, ...]
    coming: tuple[bool, ...]
    begun: tuple[bool, ...]
    held: tuple[tuple[int, ...], ...]
    skips: tuple[tuple[int, int, int, int, int], ...] = ()


@lru_cache(maxsize=64)
def _moments(lists: Schedule, recomputed: int, skips: bool) -> list[list[Moment]]:
    """Return the moments of each device that may be its fullest: those alike do not hold as much of everything."""
    events = (
        lists.replay(lambda x: units(x) * (x.kind != "recompute"), ahead=False).events
        if skips
        else []
    )
    times = {event[:3]: event[3:] for event in events}
    ends: dict[tuple[bool, int], list[float]] = defaultdict(list)
    for kind, _, s, _, end in events:
        if kind != "backward_weights":
            ends[kind == "forward", s].append(end)

    def done(way: bool, s: int, now: float) -> int:
        return bisect_right(ends[way, s], now)

    def between(s: int, t: int, now: float, end: float) -> tuple[int, int, int, int, int]:
        away, waiting = (done(way, s, now) - done(way, t, now) for way in (True, False))
        return (
            s,
            t,
            max(0, away),
            max(0, done(False, t, end) - done(False, s, now)),
            max(0, waiting),
        )

    found = []
    for actions in lists.lists:
        own = tuple(sorted({action.stage for action in actions}))
        ways = [(s, t) for s in own for t in range(len(lists.placement))] if skips else []
        held, left, begun = (
            {s: [0, 0, 0] for s in own},
            dict.fromkeys(own, lists.micro_batches),
            set[int](),
        )
        alike: dict[object, list[tuple[list[int], Moment]]] = defaultdict(list)
        for k, (kind, i, s) in enumerate(actions):
            plain, back = i >= recomputed, kind in ("backward", "backward_inputs")
            if kind == "recompute" and plain:
                continue
            left[s] -= kind == "forward"
            held[s][plain] -= kind == "recompute" or (back and plain)
            held[s][2] -= kind == "backward_weights"
            start, end = times[actions[k + (kind == "recompute")]] if skips else (0.0, 0.0)
            coming, started = tuple([left[j] > 0 for j in own]), tuple([j in begun for j in own])
            pairs = tuple([between(*way, start, end) for way in ways])
            now = Moment(
                kind, s, not plain, own, coming, started, tuple(map(tuple, held.values())), pairs
            )
            much = [x for each in (*now.held, *(pair[2:] for pair in pairs)) for x in each]
            others = alike[now[:6]]
            if not any(
                all(a >= b for a, b in zip(other, much, strict=True)) for other, _ in others
            ):
                others[:] = [
                    x for x in others if any(a > b for a, b in zip(x[0], much, strict=True))
                ] + [(much, now)]
            held[s][plain] += kind == "forward"
            held[s][2] += kind == "backward_inputs"
            begun |= {s} if back else set()
        found.append([now for others in alike.values() for _, now in others])
    return found


class _Stage:
    """What the tasks of a stage take: checkpointed and plain ones, and those of which the half for weights is left."""

    def __init__(self, counts: Counts, setup: Setup, s: int) -> None:
        start, stop = setup.cuts[s]
        size = setup.sizes[0]
        recomputed = checkpointed(setup.checkpoint, len(setup.sizes))
        # Only what is needed is worked out: it takes most of the time.
        self.checkpointed = self.plain = counts.task(size, start, stop, checkpoint=recomputed > 0)
        if recomputed < len(setup.sizes) or start == 0:
            self.plain = counts.task(size, start, stop, checkpoint=False)
        self.layers = counts.low[start:stop]
        self.parameters = [float(x) for layer in self.layers for x in layer.parameter_sizes]
        # Backwards of weights need what layers with products have saved, and their outputs' gradients.
        pairs = (
            zip(counts.footprints(size)[start:stop], self.layers, strict=True)
            if setup.halves
            else ()
        )
        late = [footprint for footprint, layer in pairs if layer.products]
        self.grads = sum(footprint.output_grad for footprint in late)
        sizes = {
            number: nbytes
            for footprint in late
            for number, nbytes in footprint.sizes
            if number in footprint.saves
        }
        self.half = sum(sizes.values()) + self.grads

    def stashed(self, recomputed: int, plain: int, later: int = 0) -> float:
        """Return the bytes of so many tasks in flight."""
        return recomputed * self.checkpointed.inputs + plain * self.plain.kept + later * self.half


class _Device:
    """What a device holds in a step, moment by moment.

    In GPipe's the user holds the gathered output on the last device, also during the optimizer's step, and its gradient
    throughout backward. While outputs are gathered, the micro-batches' outputs and the whole are there at once.
    """

    def __init__(
        self,
        counts: Counts,
        setup: Setup,
        own: Sequence[int],
        crossings: Sequence[tuple[int, int, Stashed]],
    ):
        self._counts, self._setup, self._crossings = counts, setup, crossings
        self._m, self._n, self._gathered = len(setup.sizes), len(setup.cuts), setup.gathered
        self._recomputed = checkpointed(setup.checkpoint, self._m)
        self._stages = {s: _Stage(counts, setup, s) for s in own}
        layers = [layer for stage in self._stages.values() for layer in stage.layers]
        self._parameters = float(sum(layer.parameters for layer in layers))
        self._kept_grads = (
            self._parameters if setup.zeroed else 0.0
        )  # gradients that stay between steps
        frozen = sum(layer.frozen for layer in layers) + (
            counts.input * setup.batch_size if 0 in own else 0.0
        )
        state = setup.optimizer.state * self._parameters
        self._always = DeviceBytes(self._parameters + frozen, self._kept_grads, state)

    def fullest(self, moments: Sequence[Moment]) -> DeviceBytes:
        """Return what it holds at the fullest of these moments, between forward and backward, or in the update."""
        found, last = [*map(self._at, moments)], self._stages.get(self._n - 1)
        gathered = self._m * last.plain.output if last and self._gathered else 0.0
        if gathered:
            stashed = sum(
                x.stashed(self._recomputed, self._m - self._recomputed)
                for x in self._stages.values()
            )
            working = gathered if self._m > 1 else 0.0
            found.append(self._always._replace(stashed=stashed + gathered, working=working))
        summed = self._parameters + (0.0 if self._gathered else self._kept_grads)
        update = self._setup.optimizer.temporaries(
            [x for stage in self._stages.values() for x in stage.parameters]
        )
        found.append(self._always._replace(gradients=summed, stashed=gathered, update=update))
        return max(found, key=lambda x: x.peak)

    def _at(self, now: Moment) -> DeviceBytes:
        copied, back = self._counts.copied, now.kind in ("recompute", "backward", "backward_inputs")
        stage, begun = self._stages[now.stage], dict(zip(now.stages, now.begun, strict=True))
        task, first = stage.checkpointed if now.recomputed else stage.plain, not begun[now.stage]
        stashed = copies = 0.0
        for s, coming, flying in zip(now.stages, now.coming, now.held, strict=True):
            stashed += self._stages[s].stashed(*flying)
            plain, count, here = self._stages[s].plain, sum(flying[:2]), back and s == now.stage
            if s == self._n - 1 and self._gathered and now.kind != "forward":
                stashed += self._m * (plain.output + plain.output_grad)
            elif s == self._n - 1:
                stashed += (count + here) * plain.output + here * plain.output_grad
            elif copied:  # of the gradients for this task, and for the one after it
                copies += (here + (count > 0 and not self._gathered)) * plain.output_grad
            copies += coming and s > 0 and task.inputs - task.arrivals
        copies += task.input_grad if back and not first and now.stage else 0.0
        if now.kind == "forward":
            working = task.inputs + task.forward
        elif now.kind == "recompute":
            working = task.inputs + task.graph
        elif now.kind == "backward_weights":
            working = stage.half + max(stage.parameters, default=0.0)
        else:
            # Tasks have graphs of their own if there are copies or recomputation. If not, all share one graph.
            working = task.kept + stage.grads + (task.first if first else task.later)
            if self._gathered and self._n == 1 and not self._recomputed:
                later = task.later if self._setup.zeroed and self._m == 1 else task.first
                working = task.kept + (later if first else task.summed)
        return self._always._replace(
            gradients=self._kept_grads
            + sum(sum(self._stages[s].parameters) for s in now.stages if begun[s]),
            stashed=stashed,
            working=working,
            skips=sum(self._skips(*pair) for pair in now.skips),
            copies=copies,
        )

    def _skips(self, s: int, t: int, away: int, early: int, waiting: int) -> float:
        """Return the bytes of skips on their way from s to t, and of gradients; not copied, these are where made."""
        copied = self._counts.copied
        leaving = sum(
            away * x.bytes + early * copied * x.grad
            for a, b, x in self._crossings
            if (a, b) == (s, t)
        )
        return leaving + sum(
            waiting * (not copied) * x.grad for a, b, x in self._crossings if (a, b) == (t, s)
        )
