"""Record when the tasks of mini-batches run on all ranks, and write the times into one file."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from torchgpipe.caught import how_many
from torchgpipe.partitioned import Partitioned
from torchgpipe.plain import packed, unpacked
from torchgpipe.schedules.replay import Event, Timeline
from torchgpipe.timeline.perfetto import bubbles, perfetto
from torchgpipe.timeline.stopwatch import Stopwatch

ROUNDS = 50
"""How many messages all ranks exchange to compare their clocks."""


@dataclass(repr=False)
class Recording:
    """The recorded times of mini-batches on all ranks, in seconds since the first task began.

    Every rank gets an equal recording.

    Attributes:
        steps: A timeline of each mini-batch. The list is filled when the `with` block of `record`
            ends.
        clock_error: The largest possible error, in seconds, of the measured difference between the
            clocks of rank 0 and of another rank.
        over_ranks: Whether the pipeline runs over several ranks, each of which is a device.
    """

    steps: list[Timeline] = field(default_factory=list)
    clock_error: float = 0.0
    over_ranks: bool = False

    @property
    def row(self) -> str:
        """What a row of the timeline stands for: "rank", "device" or "partition".

        It is "rank" if the pipeline runs over ranks. Otherwise it is "device" if a device has
        several partitions, and "partition" if each device has one.
        """
        if self.over_ranks:
            return "rank"
        several = any(len(step.placement) > step.partitions for step in self.steps)
        return "device" if several else "partition"

    def __repr__(self) -> str:
        """Return a line with the bubble: the fraction of time in which devices compute no task.

        The time of a mini-batch lasts from its first task to its last task.
        """
        shares = bubbles(self.steps)
        if not shares:
            return "no mini-batch was recorded"
        each = ", ".join(f"{self.row} {j} {share:.1%}" for j, share in enumerate(shares))
        bubble = sum(shares) / len(shares)
        seconds = sum(step.seconds for step in self.steps)
        count = len(self.steps)
        said = f"{how_many(count, 'mini-batch')}, {seconds:.3g} s: bubble {bubble:.1%} ({each})"
        if self.over_ranks:
            said += f"; clocks agree to {1000 * self.clock_error:.2g} ms"
        return said


@contextmanager
def record(model: Partitioned, file: str | Path | None = None) -> Iterator[Recording]:
    """Record the mini-batches within a `with` block, and write their times to a file for Perfetto.

        with record(model, "timeline.json") as recording:
            for x, target in batches[:3]:
                ...                                                  # a training step
        print(recording)                                             # the fraction of the bubble

    If the pipeline runs over ranks, all ranks have to enter this context. The first rank writes one
    file for all ranks. If the `with` block raises an exception, no file is written.

    The first mini-batch of a new pipeline takes longer than later ones, because threads are started
    and memory is allocated. So run one mini-batch before the recording.

    Args:
        model: The pipeline.
        file: The path of the file, or `None` to write no file.

    Raises:
        TypeError: If `model` is not a pipeline.
        ValueError: If `model.observer` is already set.
        OSError: If the file cannot be written.
    """
    if not isinstance(model, Partitioned):
        raise TypeError(
            f"record takes a pipeline, but got {type(model).__name__}; call record(model, file)"
        )
    if model.observer is not None:
        raise ValueError(
            "recording a timeline needs model.observer, but model.observer is already set; set it "
            "to None first"
        )
    devices = {stage.index: stage.device for stage in model._stages}
    path = Path(file) if file is not None and 0 in devices else None
    part = None if path is None else path.with_name(f"{path.name}.part")
    if part is not None:
        part.touch()  # raises an error before the training if the file cannot be written
    recording = Recording()
    model.observer = stopwatch = Stopwatch(devices)
    try:
        try:
            yield recording
        finally:
            model.observer = None
        _gather(recording, model, stopwatch)
        if part is not None and path is not None:
            steps, row, error = recording.steps, recording.row, recording.clock_error
            part.write_bytes(perfetto(steps, path.stem, row, clock_error=error))
            part.replace(path)
    finally:
        if part is not None:
            part.unlink(missing_ok=True)


def _gather(recording: Recording, model: Partitioned, stopwatch: Stopwatch) -> None:
    """Fill a recording with the events of all ranks, and convert all times to rank 0's clock."""
    own = [tuple(event) for event in stopwatch.events()]
    with model._together("record") as exchange:
        ahead, recording.clock_error = clocks_ahead(exchange)
        gathered = exchange(packed(own))
    recording.over_ranks = len(gathered) > 1
    events = []
    for of_rank, seconds in zip(gathered, ahead, strict=True):
        for kind, i, j, start, end in unpacked(of_rank):
            event = Event(kind, i, j, start - seconds, end - seconds)
            events.append(event)
    recording.steps += mini_batches(events, model.schedule.placement)


def mini_batches(events: Iterable[Event], placement: Sequence[int]) -> list[Timeline]:
    """Split events into mini-batches, and return a timeline of each mini-batch.

    On each partition, a mini-batch begins with the forward of micro-batch 0. The timelines have
    times in seconds since the first task of the first mini-batch began.
    """
    begun: Counter[int] = Counter()
    found: dict[int, list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.start):
        partition = event.partition
        if event.kind == "forward" and event.micro_batch == 0:
            begun[partition] += 1
        found[begun[partition]].append(event)
    found.pop(0, None)  # the events of a mini-batch that began before the recording
    starts = [step[0].start for step in found.values()]
    origin = min(starts, default=0.0)
    devices = len({*placement})
    steps = []
    for _, step in sorted(found.items()):
        moved = []
        for event in step:
            start, end = event.start - origin, event.end - origin
            moved.append(event._replace(start=start, end=end))
        timeline = Timeline(moved, 0.0, devices, placement)
        begin, end = timeline.window
        steps.append(replace(timeline, seconds=end - begin))
    return steps


def clocks_ahead(exchange: Callable[[Tensor], list[Tensor]]) -> tuple[list[float], float]:
    """Return how many seconds each rank's clock is ahead of rank 0's clock, and the largest error.

    The clock is `time.perf_counter`. All ranks call this function at the same time.

    There are several rounds. In each round, every rank sends a message to all other ranks. A rank
    notes the time before it sends, and the time when it has received the messages of all other
    ranks. A message is received after it is sent. So if the clock of rank j is d seconds ahead of
    the clock of rank 0, then

        sent by j - received by 0  <=  d  <=  received by j - sent by 0

    The result for rank j is the middle between the largest lower bound and the smallest upper bound
    of all rounds. Its error is at most half the distance between these bounds.

    Args:
        exchange: A function that sends a tensor to all ranks, and returns the tensors of all ranks.
    """
    stamps = []
    for _ in range(ROUNDS):
        sent = time.perf_counter()
        exchange(torch.zeros(0, device="cpu"))
        stamps.append((sent, time.perf_counter()))
    own = torch.tensor(stamps, dtype=torch.float64, device="cpu")
    return ahead_of_first(exchange(own))


def ahead_of_first(stamps: Sequence[Tensor]) -> tuple[list[float], float]:
    """Return how many seconds each rank's clock is ahead of rank 0's clock, and the largest error.

    This function does the computation of `clocks_ahead`, from the times that all ranks have noted.

    Args:
        stamps: A tensor of shape (rounds, 2) for each rank. A row has the time when the rank sent
            its message, and the time when it had received the messages of all other ranks.
    """
    first_sent, first_heard = stamps[0].unbind(1)
    ahead = [0.0]
    errors = [0.0]
    for own in stamps[1:]:
        sent, heard = own.unbind(1)
        least = (sent - first_heard).max()
        most = (heard - first_sent).min()
        ahead.append(float(least + most) / 2)
        errors.append(float(most - least) / 2)
    return ahead, max(errors)
