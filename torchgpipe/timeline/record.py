"""Record when the tasks of some mini-batches of a training run, on all ranks, and write that into one file."""

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from torchgpipe.partitioned import Partitioned
from torchgpipe.plain import packed, unpacked
from torchgpipe.plan.replay import Event, Timeline, bubbles
from torchgpipe.timeline.clocks import clocks_ahead
from torchgpipe.timeline.perfetto import perfetto
from torchgpipe.timeline.stopwatch import Stopwatch


@dataclass
class Recording:
    """Mini-batches as they ran on all ranks, in seconds since the first task began. On every rank it is the same.

    Attributes:
        steps: a timeline of each mini-batch; complete when the `with` of `record` has ended.
        clock_error: by how many seconds times of one rank may be wrong beside those of rank 0.
        over_ranks: whether each partition is a rank.
    """

    steps: list[Timeline] = field(default_factory=list)
    clock_error: float = 0.0
    over_ranks: bool = False

    @property
    def row(self) -> str:
        """What a partition is called."""
        return "rank" if self.over_ranks else "partition"

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
        raise ValueError("a timeline is recorded by the model's observer, but it has one already: set it to None")
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
        events = [Event(kind, i, j, start - s, end - s) for own, s in of_ranks for kind, i, j, start, end in own]
        recording.steps += mini_batches(events, len(model.balance))
        if part is not None and path is not None:
            part.write_bytes(perfetto(recording.steps, path.stem, recording.row, clock_error=recording.clock_error))
            os.replace(part, path)
    finally:
        if part is not None:
            part.unlink(missing_ok=True)


def mini_batches(events: Iterable[Event], partitions: int) -> list[Timeline]:
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
        moved = [event._replace(start=event.start - origin, end=event.end - origin) for event in step]
        begin, end = Timeline(moved, 0.0, partitions).window
        steps.append(Timeline(moved, end - begin, partitions))
    return steps
