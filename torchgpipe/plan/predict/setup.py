"""A setup: the settings of a training run for which the planner predicts a step."""

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torchgpipe.engine.arrangement import arranged
from torchgpipe.plan.count.optimizer import STATELESS, Optimizer
from torchgpipe.plan.predict.replay import recomputing
from torchgpipe.schedules import Schedule
from torchgpipe.tensors.checkpoint import Mode


@dataclass(frozen=True)
class Setup:
    """The settings of a training run, from which the planner predicts a step.

    Attributes:
        batch_size: The number of samples in a mini-batch.
        balance: How many layers each partition has.
        chunks: How many micro-batches the mini-batch is split into, at most.
        checkpoint: Which micro-batches are checkpointed.
        optimizer: The memory that the optimizer takes.
        portals: Whether skips are copied directly to the partition that pops them. If not, they are
            copied from partition to partition until they reach it.
        streams: Whether devices copy tensors while they run tasks. If not, a copy keeps the sending
            and the receiving device from running tasks.
        zeroed: Whether gradients stay allocated between steps and are set to zero, as was the
            default before PyTorch 2.0. A step then adds its gradients to these tensors.
        scattered: Whether the gradients of a partition leave the device right after its backward,
            as with FSDP, which sums them and scatters them over all devices.
        schedule: The name of a schedule, or a schedule.
    """

    batch_size: int
    balance: tuple[int, ...]
    chunks: int = 1
    checkpoint: Mode = "except_last"
    optimizer: Optimizer = STATELESS
    portals: bool = True
    streams: bool = True
    zeroed: bool = False
    scattered: bool = False
    schedule: str | Schedule = "GPipe"

    @property
    def full_schedule(self) -> Schedule:
        """The schedule of this setup's micro-batches, with recomputations (`full_schedule_of`)."""
        return self.full_schedule_of(len(self.sizes))

    def full_schedule_of(self, m: int) -> Schedule:
        """Return the schedule for `m` micro-batches: the actions of each device, in order.

        The actions include a recomputation of every task. If a task is not checkpointed, its
        recomputation counts as taking no time.
        """
        schedule, n, v, _ = arranged(self.schedule, len(self.balance))
        return recomputing(schedule, n, m, v)

    @property
    def gathered(self) -> bool:
        """Whether one loss is computed from the outputs of all micro-batches: `loss(model(x))`.

        With GPipe's schedule, it is true. With other schedules, it is false, because a step is
        `GPipe.step`, which computes a loss for each micro-batch.
        """
        return isinstance(self.schedule, str) and self.schedule.lower() == "gpipe"

    @property
    def halves(self) -> bool:
        """Whether backwards are split: gradients of inputs come first, those of weights later."""
        schedule = self.schedule
        if not isinstance(schedule, Schedule):
            schedule = recomputing(schedule, 1, 1)
        return schedule.halves

    @property
    def sizes(self) -> list[int]:
        """The number of samples in each micro-batch."""
        return micro_batch_sizes(self.batch_size, self.chunks)

    @property
    def cuts(self) -> list[tuple[int, int]]:
        """For each partition, the range of its layers as a pair (first layer, last layer + 1)."""
        return list(pairwise(accumulate(self.balance, initial=0)))


def micro_batch_sizes(batch_size: int, chunks: int) -> list[int]:
    """Return the number of samples in each micro-batch of a mini-batch.

    As with `torch.chunk`, all micro-batches have the same size, but the last one may be smaller.
    """
    size = math.ceil(batch_size / chunks)
    whole, rest = divmod(batch_size, size)
    sizes = [size] * whole
    if rest > 0:
        sizes.append(rest)
    return sizes
