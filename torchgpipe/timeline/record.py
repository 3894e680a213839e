"""Record when the tasks of some mini-batches of a training run, on all ranks, and write that into one file."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from torchgpipe.partitioned import Partitioned
from torchgpipe.plain import packed, unpacked
from torchgpipe.schedules.replay import Event, Timeline
from torchgpipe.timeline.perfetto import bubbles, perfetto
from torchgpipe.timeline.stopwatch import Stopwatch

ROUNDS = 50


@dataclass
class Recording:
    """Mini-batches as they ran on all ranks, in seconds since the first task began. On every rank it is the same.

    Attributes:
        steps: a timeline of each mini-batch; complete when the `with` of `record` has ended.
        clock_error: by how many seconds times of one rank may be wrong beside those of rank 0.
        over_ranks: whether each device is a rank.
    """

    steps: list[Timeline] = field(default_factory=list)
    clock_error: float = 0.0
    over_ranks: bool = False

    @property
    def row(self) -> str:
        """What a device is called: a partition, where it has only one."""
        several = any(len(step.placement) > step.partitions for step in self.steps)
        return "rank" if self.over_ranks else "device" if several else "partition"

    def __str__(self) -> str:
        """Say the bubble: the share of mini-batches' time, from first task to last, in which no task is computed."""
        shares = bubbles(self.steps)
        if not shares:
            return "no mini-batch was recorded"
        each = ", ".join(f"{self.row} {j} {share:.1%}" for j, share in enumerate(shares))
        seconds = sum(step.seconds for step in self.steps)
        count = f"{len(self.steps)} mini-batch{'es' * (len(self.steps) > 1)}"
        said = f"{count}, {seconds:.3g} s: bubble {sum(shares) / len(shares):.1%} ({each})"
        return said + f"; clocks agree to {1000 * self.clock_error:.2g} ms" * self.over_ranks


@contextmanager
def record(model: Partitioned, file: str | Path | None = None) -> Iterator[Recording]:
    """Record the mini-batches within a `with`, and write them to `file` for Perfetto; over ranks, one file for all.

        with record(model, "timeline.json") as recording:
            for x, target in batches[:3]:
                ...                                                       # a training step
        print(recording)                                                  # the bubble, as a share of the time

    Over ranks, all of them do so at once, and the first rank writes the file. An exception within is passed on, and
    nothing is written.

    Raises:
        ValueError: the model has an observer already.
        OSError: the file cannot be written.
    """
    if model.observer is not None:
        raise ValueError(
            "a timeline is recorded by the model's observer, but it has one already: set it to None"
        )
    devices = {stage.index: stage.device for stage in model._stages}
    path = Path(file) if file is not None and 0 in devices else None
    part = None if path is None else path.with_name(f"{path.name}.part")
    if part is not None:
        part.touch()  # what cannot be written shall be known before the training
    recording = Recording()
    model.observer = stopwatch = Stopwatch(devices)
    try:
        try:
            yield recording
        finally:
            model.observer = None
        with model._together("recording a timeline") as exchange:
            ahead, recording.clock_error = clocks_ahead(exchange)
            gathered = exchange(packed([tuple(event) for event in stopwatch.events()]))
        recording.over_ranks = len(gathered) > 1
        of_ranks = zip(map(unpacked, gathered), ahead, strict=True)
        events = [
            Event(kind, i, j, start - s, end - s)
            for own, s in of_ranks
            for kind, i, j, start, end in own
        ]
        recording.steps += mini_batches(events, model.schedule.placement)
        if part is not None and path is not None:
            part.write_bytes(
                perfetto(
                    recording.steps, path.stem, recording.row, clock_error=recording.clock_error
                )
            )
            part.replace(path)
    finally:
        if part is not None:
            part.unlink(missing_ok=True)


def mini_batches(events: Iterable[Event], placement: Sequence[int]) -> list[Timeline]:
    """Return a timeline of each mini-batch, with times since the first task of all.

    A mini-batch begins on each partition with the forward of micro-batch 0.
    """
    begun: Counter[int] = Counter()
    found: dict[int, list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.start):
        begun[event.partition] += event.kind == "forward" and event.micro_batch == 0
        found[begun[event.partition]].append(event)
    found.pop(0, None)  # of a mini-batch that had begun before
    origin = min((event.start for step in found.values() for event in step), default=0.0)
    steps = []
    for _, step in sorted(found.items()):
        moved = [
            event._replace(start=event.start - origin, end=event.end - origin) for event in step
        ]
        timeline = Timeline(moved, 0.0, len({*placement}), placement)
        begin, end = timeline.window
        steps.append(replace(timeline, seconds=end - begin))
    return steps


def clocks_ahead(exchange: Callable[[Tensor], list[Tensor]]) -> tuple[list[float], float]:
    """Return by how many seconds each rank's `time.perf_counter` is ahead of rank 0's, and the largest error of that.

    All ranks call this at once. `exchange` gives all ranks a tensor, and returns what each of them gave.

    In each round all ranks send a message to all others. Each notes its own clock before that, and when it has heard
    all. Nothing is heard before it is sent. So for rank j, whose clock is ahead of rank 0's by d,

        sent by j - heard by 0  <=  d  <=  heard by j - sent by 0

    The round in which messages took least time has the narrowest bounds. The middle between them is taken for d, which
    is wrong by at most half of their distance.
    """
    stamps = []
    for _ in range(ROUNDS):
        sent = time.perf_counter()
        exchange(torch.zeros(0, device="cpu"))
        stamps.append((sent, time.perf_counter()))
    return ahead_of_first(exchange(torch.tensor(stamps, dtype=torch.float64, device="cpu")))


def ahead_of_first(stamps: Sequence[Tensor]) -> tuple[list[float], float]:
    """Return what `clocks_ahead` does, by each rank's times of sending and of having heard, (rounds, 2)."""
    sent, heard = stamps[0].unbind(1)
    ahead, errors = [0.0], [0.0]
    for own in stamps[1:]:
        least, most = (own[:, 0] - heard).max(), (own[:, 1] - sent).min()
        ahead.append(float(least + most) / 2)
        errors.append(float(most - least) / 2)
    return ahead, max(errors)
