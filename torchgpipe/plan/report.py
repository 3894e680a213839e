"""The result of planning: `Plan`, which has the best setup and prints as a report."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from textwrap import fill

import torch
from torch.nn import Sequential

from torchgpipe.caught import how_many
from torchgpipe.gpipe import GPipe
from torchgpipe.plan import tables
from torchgpipe.plan.hardware.amount import amount
from torchgpipe.plan.hardware.hardware import Hardware
from torchgpipe.plan.predict.predict import Predictor
from torchgpipe.plan.reasons import (
    Bottleneck,
    about_alternatives,
    about_bottleneck,
    about_bubble,
    about_memory,
    find_bottleneck,
)
from torchgpipe.plan.search.alternatives import Alternative
from torchgpipe.plan.search.impossible import Impossible
from torchgpipe.plan.search.search import Found
from torchgpipe.plan.search.trial import Candidate
from torchgpipe.plan.tables import WIDTH, duration, figure
from torchgpipe.schedules import Schedule
from torchgpipe.tensors.checkpoint import Mode

INDENT = " " * 12


@dataclass(frozen=True)
class Plan:
    """The fastest setup of a pipeline that was found, and others to compare it with.

    A setup is a balance, a number of micro-batches, a checkpoint mode and a schedule. For each
    setup, the seconds and the memory of a training step are predicted.

    `print(plan)` writes a report with tables. `plan.summary` is one line of text.
    """

    candidates: Sequence[Candidate]
    """The best setup for each number of partitions, the fastest first.

    There is one exception: a setup that takes at most 0.5 % longer than the fastest one, but has
    fewer devices, comes before it.
    """
    bound: float
    """The lowest seconds that any setup can reach, among the setups that were asked for."""
    memory: float
    """The bytes of each device."""
    room: float
    """How many bytes tensors may take on each device."""
    precision: str
    """The types in which matrix products are computed, such as "float32 and TF32"."""
    hardware: Hardware
    source: str
    """What the seconds were predicted from, as text: a profile or a hardware description."""
    by_devices: Mapping[int, Found] = field(repr=False)
    """For each number of devices, the best setup and the lowest seconds that any can reach."""
    by_schedule: Sequence[tuple[str, Candidate | None]] = field(repr=False)
    """For each schedule, its name and its best setup; `None` if no setup fits."""
    beside: Mapping[int, Sequence[Alternative]] = field(repr=False)
    """The predictions without a pipeline for each number of devices: data parallel, and FSDP."""
    predictor: Predictor = field(repr=False)
    """The predictor that the plan was made with."""
    module: Sequential = field(repr=False)

    @property
    def best(self) -> Candidate:
        """The fastest setup that was found."""
        return self.candidates[0]

    @property
    def balance(self) -> list[int]:
        """The number of layers in each partition."""
        return list(self.best.setup.balance)

    @property
    def chunks(self) -> int:
        """The number of micro-batches."""
        return len(self.best.setup.sizes)

    @property
    def checkpoint(self) -> Mode:
        """The checkpoint mode: which micro-batches are recomputed."""
        return self.best.setup.checkpoint

    @property
    def schedule(self) -> str | Schedule:
        """The schedule: the argument `schedule` of `GPipe`."""
        return self.best.setup.schedule

    @property
    def seconds(self) -> float:
        """The predicted seconds of a step.

        With GPipe's schedule, a step is `loss(model(x)).backward()`. With other schedules, it is
        `model.step`.
        """
        return self.best.seconds

    @property
    def gap(self) -> float:
        """An upper bound on how much faster another setup could be: 0.05 means 5 % faster."""
        return self.seconds / self.bound - 1

    @property
    def bubble(self) -> float:
        """The predicted share of the devices' time in which they wait, from 0 to 1."""
        return self.best.bubble

    @property
    def peaks(self) -> list[float]:
        """The predicted peak of the bytes that tensors take on each device."""
        return [device.peak for device in self.best.devices]

    @property
    def bottleneck(self) -> Bottleneck:
        """The slowest layer of the device that works longest."""
        return find_bottleneck(self.predictor, self.best)

    @property
    def summary(self) -> str:
        """One line of text: the setup, and the predicted seconds and memory of a step."""
        setup = self.best.setup
        n = len(self.best.devices)
        devices = how_many(n, "device")
        peak, memory = amount(self.best.peak), amount(self.memory)
        return (
            f"plan: {setup.full_schedule.name} on {devices}, "
            f"balance {tables.listed(setup.balance, 60)}, "
            f"{how_many(self.chunks, 'micro-batch')} of {setup.sizes[0]}, "
            f"checkpoint {self.checkpoint}; predicted {duration(self.seconds)} a step in "
            f"{self.precision}, at most {peak} of {memory} on a device"
        )

    def on(self, devices: int) -> "Plan":
        """Return the plan for exactly this number of devices, even if fewer devices are faster.

        Raises:
            Impossible: If no setup for this number of devices was found.
        """
        found = self.by_devices.get(devices, Found())
        if found.best is None:
            numbers = ", ".join([str(len(each.devices)) for each in self.candidates])
            raise Impossible(
                f"no setup for {devices} devices was found, but there are setups for these numbers "
                f"of devices: {numbers}; use one of these, or more layers, or another batch size"
            )
        others = [each for each in self.candidates if each is not found.best]
        return replace(self, candidates=[found.best, *others], bound=found.bound)

    def gpipe(self, *, devices: Iterable[int | str | torch.device] | None = None) -> GPipe:
        """Make the planned pipeline. This moves the model's layers to the devices.

        Args:
            devices: The devices to use. If there are more than the plan needs, only the first ones
                are used. By default, `GPipe` chooses the devices.

        Returns:
            The pipeline.

        Raises:
            ValueError: If the model is on `meta` and the devices are not, or if `GPipe` refuses the
                devices.
        """
        given = None
        real = True
        if devices is not None:
            given = list(devices)[: len(self.best.devices)]
            real = any(torch.device(device).type != "meta" for device in given)
        state = (*self.module.parameters(), *self.module.buffers())
        if real and any(x.is_meta for x in state):
            schedule = getattr(self.schedule, "name", self.schedule)
            raise ValueError(
                "the model is on device 'meta' and has no values to move: "
                "build it on a real device, and make the pipeline with "
                f"GPipe(model, {self.balance}, chunks={self.chunks}, "
                f"checkpoint={self.checkpoint!r}, schedule={schedule!r}); "
                "or call the plan's gpipe(devices=…) with 'meta' devices"
            )
        return GPipe(
            self.module,
            self.balance,
            devices=given,
            chunks=self.chunks,
            checkpoint=self.checkpoint,
            schedule=self.schedule,
        )

    def __str__(self) -> str:
        several = len(self.by_schedule) > 1
        parts = [self._setup(), tables.of_devices(self.best)]
        if several:
            parts.append(tables.by_schedule(self.by_schedule))
        parts += [
            tables.by_number(self.by_devices, schedules=several),
            tables.without_pipeline(self.beside, self.best.setup.batch_size, self.room),
            fill(self.reason, WIDTH),
        ]
        return "\n\n".join(parts)

    def _setup(self) -> str:
        """Return the report's first lines: the setup, its predicted seconds, and its memory."""
        best, setup = self.best, self.best.setup
        rate = figure(setup.batch_size / best.seconds)
        faster = "faster"
        if self.gap >= 0.0005:
            faster = f"more than {self.gap:.1%} faster"
        peak, memory = amount(best.peak), amount(self.memory)
        lines = [
            f"balance     {tables.listed(self.balance, WIDTH - len(INDENT))}",
            f"chunks      {self.chunks}, each a micro-batch of {setup.sizes[0]}",
            f"checkpoint  {self.checkpoint}",
            f"schedule    {setup.full_schedule.name}",
            f"precision   {self.precision}",
            f"step        {duration(best.seconds)} predicted, {rate} samples/s",
            f"{INDENT}{self._about_loss()}",
            f"{INDENT}no balance, chunks or checkpoint can be {faster}",
            f"bubble      {best.bubble:.1%} of the devices' time",
            f"memory      at most {peak} of {memory} on a device, allocated to tensors",
        ]
        if self.room < self.memory:
            left = amount(self.memory - self.room)
            lines.append(f"{INDENT}{left} are left to the allocator and to libraries")
        source = f"predicted, not measured: {self.source}"
        lines.append(fill(source, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT))
        return "\n".join(lines)

    def _about_loss(self) -> str:
        """Say how long the losses of a step take, or that the prediction is without them."""
        if not self.predictor.with_loss:
            return "without the loss; give a criterion and a target to include it"
        seconds = 0.0
        for size in self.best.setup.sizes:
            seconds += sum(self.predictor.loss(size))
        return f"with the loss: {duration(seconds)} of work on the last stage's device"

    @property
    def reason(self) -> str:
        """A few sentences that say what limits the speed of the planned pipeline.

        They name the slowest layer, and say how much time the bubble takes. They say whether a
        larger batch, more devices or more memory would help, and whether training without a
        pipeline would be faster.
        """
        best, n = self.best, len(self.best.devices)
        sentences = [
            about_bottleneck(self.bottleneck, n),
            about_bubble(self.predictor, best, self.by_devices, self.candidates, self.room),
            about_memory(best, self.by_devices[n].unlimited),
            about_alternatives(best, self.beside, self.room),
        ]
        return " ".join(filter(None, sentences))
