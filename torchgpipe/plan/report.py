"""Write a plan as text: the best setup, the best one for each number of devices, and its limits."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from textwrap import fill

import torch
from torch.nn import Sequential

from torchgpipe.gpipe import GPipe
from torchgpipe.plan.hardware.amount import amount
from torchgpipe.plan.hardware.hardware import Hardware
from torchgpipe.plan.predict.predict import Predictor
from torchgpipe.plan.search.search import Found
from torchgpipe.plan.search.trial import Candidate, assess
from torchgpipe.schedules import Schedule
from torchgpipe.tensors.checkpoint import Mode

GiB = 2**30
WIDTH = 78
INDENT = " " * 12
MUCH = 0.1
"""The text mentions memory if its limit makes the best setup slower by more than this share."""


def duration(seconds: float) -> str:
    """Return seconds as text, such as `1.23 s`, or `45.6 ms` if they are less than one."""
    if seconds >= 1:
        return f"{figure(seconds, 3)} s"
    return f"{figure(seconds * 1e3, 3)} ms"


def figure(value: float, digits: int = 4) -> str:
    """Format a number: as an integer from 1,000 on, otherwise with `digits` significant digits."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.{digits}g}"


@dataclass(frozen=True)
class Plan:
    """The best setup that was found, its prediction, and other setups to compare it with.

    `print(plan)` writes the plan as text.
    """

    candidates: Sequence[Candidate]
    """The best setup for each number of partitions, the fastest first."""
    bound: float
    """The lowest seconds that any setup can reach, among the setups that were asked for."""
    memory: float
    """The bytes of each device."""
    room: float
    """How many bytes of each device tensors may take."""
    hardware: Hardware
    source: str
    """What the seconds were predicted from, as text: a profile or a hardware description."""
    by_devices: Mapping[int, Found] = field(repr=False)
    """For each number of devices, the best setup and the lowest seconds that any can reach."""
    beside: Sequence[Candidate] = field(repr=False)
    """The predictions for data parallel training, for the same numbers of devices."""
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
        """How much faster another setup can be at most, as a share: 0.05 means 5 %."""
        return self.seconds / self.bound - 1

    @property
    def bubble(self) -> float:
        """The predicted share of the devices' time in which the devices wait."""
        return self.best.bubble

    @property
    def peaks(self) -> list[float]:
        """The predicted peak memory of each device, in bytes that tensors take."""
        return [device.peak for device in self.best.devices]

    def gpipe(self, *, devices: Iterable[int | str | torch.device] | None = None) -> GPipe:
        """Return the `GPipe` that the plan describes. It moves the model's layers to the devices.

        Args:
            devices: The devices to use. If there are more than the plan needs, only the first are
                used. By default, `GPipe` chooses them.

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
                "or call gpipe(devices=…) with 'meta' devices"
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
        parts = [self._setup(), self._devices(), self._numbers()]
        if reason := self.reason:
            parts.append(fill(reason, WIDTH))
        return "\n\n".join(parts)

    def _setup(self) -> str:
        """Return lines about the setup, its seconds, the gap to the lower bound, and its memory."""
        best, setup = self.best, self.best.setup
        balance = str(self.balance)
        if len(balance) > WIDTH - len(INDENT):
            half = WIDTH // 2 - 8
            balance = f"{balance[:half]} … {balance[-half:]}"
        rate = figure(setup.batch_size / best.seconds)
        faster = "faster"
        if self.gap >= 0.0005:
            faster = f"more than {self.gap:.1%} faster"
        peak, memory = amount(best.peak), amount(self.memory)
        lines = [
            f"balance     {balance}",
            f"chunks      {self.chunks}, each a micro-batch of {setup.sizes[0]}",
            f"checkpoint  {self.checkpoint}",
            f"schedule    {setup.lists.name}",
            f"step        {duration(best.seconds)} predicted, {rate} samples/s",
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

    def _devices(self) -> str:
        """Return a table of the layers and the memory of each device."""
        setup = self.best.setup
        placement = setup.lists.placement
        lines = ["device  layers  model+grads  optimizer  stashed  working  copies    total"]
        for j, device in enumerate(self.best.devices):
            stages = zip(setup.balance, placement, strict=True)
            layers = "+".join([str(layers) for layers, where in stages if where == j])
            cells = [
                f"{j:>6}  {layers:>6}",
                _gib(device.parameters + device.gradients, 13),
                _gib(device.optimizer + device.update, 11),
                _gib(device.stashed, 9),
                _gib(device.working, 9),
                _gib(device.copies + device.skips, 8),
                _gib(device.peak, 9),
            ]
            lines.append("".join(cells))
        lines.append("(GiB, at each device's fullest moment)")
        return "\n".join(lines)

    def _numbers(self) -> str:
        """Return a table with a row for each number of devices.

        A row has the best setup for this number and, beside it, data parallel training.
        """
        batch_size = self.best.setup.batch_size
        lines = ["devices  samples/s  chunks   checkpoint    GiB  bubble  | data parallel    GiB"]
        for (n, found), other in zip(self.by_devices.items(), self.beside, strict=True):
            pipeline = f"{'no room':>9}"
            best = found.best
            if best is not None:
                rate = figure(batch_size / best.seconds)
                setup = best.setup
                pipeline = f"{rate:>9}{len(setup.sizes):>8}{setup.checkpoint:>13}"
                pipeline += f"{_gib(best.peak, 7)}{best.bubble:>8.1%}"
            rate = "no room"
            if other.peak <= self.room:
                rate = figure(batch_size / other.seconds)
            lines.append(f"{n:>7}  {pipeline:<45}  |{rate:>14}{_gib(other.peak, 7)}")
        note = (
            "(GiB of the fullest device. Data parallel: the whole model and a share of the batch "
            "on each device, nothing recomputed; on one device that is plain training)"
        )
        lines.append(fill(note, WIDTH))
        return "\n".join(lines)

    @property
    def reason(self) -> str:
        """What limits the plan's speed, in a few sentences.

        The sentences say how much time the bubble takes, whether a larger batch, more devices or
        more memory would help, and whether data parallel training fits the memory and is faster.
        """
        best, n = self.best, len(self.best.devices)
        sentences = []
        if bubble := self._bubble():
            sentences.append(bubble)
        unlimited = self.by_devices[n].unlimited
        if best.seconds > unlimited * (1 + MUCH):
            faster = best.seconds / unlimited - 1
            sentences.append(
                f"Memory limits the speed: with more of it, n = {n} would be {faster:.0%} faster."
            )
        fitting = [other for other in self.beside if other.peak <= self.room]
        other = min(fitting, key=lambda each: each.seconds, default=best)
        if other.seconds * 1.005 < best.seconds:
            gain = best.seconds / other.seconds - 1
            sentences.append(
                f"Data parallel training on {len(other.devices)} devices has room, "
                f"and is {gain:.0%} faster: take DistributedDataParallel in place of a pipeline."
            )
        return " ".join(sentences)

    def _bubble(self) -> str:
        """Say how much time the bubble takes, and what a larger batch or another device gains."""
        best, setup = self.best, self.best.setup
        n = len(best.devices)
        if len(self.by_devices) == 1:
            return f"The bubble takes {best.bubble:.0%}." if n > 1 else ""
        if n == 1:
            return (
                "Of pipelines, one device is the fastest: what a second one saves, "
                "it loses to the bubble and to copies."
            )
        text = f"At n = {n} the bubble takes {best.bubble:.0%}"
        chunks = 2 * len(setup.sizes)
        most = getattr(setup.schedule, "micro_batches", chunks)
        more = replace(setup, batch_size=2 * setup.batch_size, chunks=min(chunks, most))
        doubled = assess(self.predictor, more)
        if doubled.peak > self.room:
            return f"{text}; twice the batch has no room with this balance."
        by_batch = 2 * best.seconds / doubled.seconds - 1
        smaller = [each for each in self.candidates if len(each.devices) < n]
        if not smaller:
            return f"{text}; twice the batch would bring {by_batch:.0%} more samples/s."
        slower = max(smaller, key=lambda each: len(each.devices))
        fewer = len(slower.devices)
        by_device = (slower.seconds / best.seconds) ** (1 / (n - fewer)) - 1
        helps = "the last device helps more than twice the batch would"
        if by_batch > by_device:
            helps = "twice the batch would help more than the last device does"
        gains = f"{by_batch:+.0%} by the batch, {by_device:+.0%} by the device"
        return f"{text}: {helps} (samples/s: {gains})."


def _gib(nbytes: float, width: int) -> str:
    return f"{nbytes / GiB:>{width}.2f}"
