"""A plan, written for people: what is predicted for its setup, for each number of devices, and for training beside it.

And, in words, what holds it back, and what would help.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from textwrap import fill

import torch
from torch import nn

from torchgpipe.gpipe import GPipe
from torchgpipe.plan.amount import amount
from torchgpipe.plan.hardware.hardware import Hardware
from torchgpipe.plan.predict import Predictor
from torchgpipe.plan.search.search import Found
from torchgpipe.plan.search.trial import Candidate, assess
from torchgpipe.schedules import Schedule
from torchgpipe.tensors.checkpoint import Mode

GiB = 2**30
WIDTH = 78
INDENT = " " * 12
MUCH = 0.1
"""The least share of time that is worth a sentence."""


def duration(seconds: float) -> str:
    """Return `1.23 s`, or milliseconds below one second."""
    return f"{figure(seconds, 3)} s" if seconds >= 1 else f"{figure(seconds * 1e3, 3)} ms"


def figure(value: float, digits: int = 4) -> str:
    """Return a number with so many significant digits, or from a thousand as an integer: 12.34, 10,540."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.{digits}g}"


@dataclass(frozen=True)
class Plan:
    """The best setup that was found, with what is predicted for it, and the runners-up. `print` it to read it."""

    candidates: Sequence[Candidate]
    """The best for each number of partitions, the fastest first."""
    bound: float
    """Seconds that none of the setups that were asked for can beat."""
    memory: float
    """Bytes of each device."""
    room: float
    """What tensors may take of them."""
    hardware: Hardware
    source: str
    """What the seconds were predicted from."""
    by_devices: Mapping[int, Found] = field(repr=False)
    """For each number of devices: the best setup, and the seconds that none can beat."""
    beside: Sequence[Candidate] = field(repr=False)
    """Data parallel training, on as many devices."""
    predictor: Predictor = field(repr=False)
    """What predicted it all."""
    module: nn.Sequential = field(repr=False)

    @property
    def best(self) -> Candidate:
        """The fastest of them."""
        return self.candidates[0]

    @property
    def balance(self) -> list[int]:
        """Layers per partition."""
        return [*self.best.setup.balance]

    @property
    def chunks(self) -> int:
        """Micro-batches per mini-batch."""
        return len(self.best.setup.sizes)

    @property
    def checkpoint(self) -> Mode:
        """Which micro-batches are recomputed."""
        return self.best.setup.checkpoint

    @property
    def schedule(self) -> str | Schedule:
        """What `GPipe(schedule=…)` is given."""
        return self.best.setup.schedule

    @property
    def seconds(self) -> float:
        """The predicted seconds of a step: `loss(model(x))` and its `backward()` for GPipe, else `model.step`."""
        return self.best.seconds

    @property
    def gap(self) -> float:
        """By how much a faster setup could be faster at most: the seconds over those that none can beat, less one."""
        return self.seconds / self.bound - 1

    @property
    def bubble(self) -> float:
        """The predicted share of the devices' time in which they wait."""
        return self.best.bubble

    @property
    def peaks(self) -> list[float]:
        """The predicted peak of each device, in bytes allocated to tensors."""
        return [device.peak for device in self.best.devices]

    def gpipe(self, *, devices: Iterable[int | str | torch.device] | None = None) -> GPipe:
        """Return the `GPipe` that the plan describes; it moves the model's layers to the first devices that are given.

        Raises:
            ValueError: the model is on `meta`, so that there is nothing to move; or as `GPipe`.
        """
        given = None if devices is None else list(devices)[: len(self.best.devices)]
        elsewhere = given is None or any(torch.device(device).type != "meta" for device in given)
        if elsewhere and any(
            x.is_meta for x in (*self.module.parameters(), *self.module.buffers())
        ):
            raise ValueError(
                "the model is on device 'meta' and has no values to move: build it on a real device, and give that "
                f"GPipe(model, {self.balance}, chunks={self.chunks}, checkpoint={self.checkpoint!r}, "
                f"schedule={getattr(self.schedule, 'name', self.schedule)!r}); "
                "or give gpipe() devices that are 'meta', too"
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
        return "\n\n".join(
            filter(
                None, (self._setup(), self._devices(), self._numbers(), fill(self.reason, WIDTH))
            )
        )

    def _setup(self) -> str:
        """Return the setup, its time and how far that is from the bound, and its memory."""
        best, setup, balance = self.best, self.best.setup, str(self.balance)
        if len(balance) > WIDTH - len(INDENT):  # is cut in the middle
            balance = f"{balance[: WIDTH // 2 - 8]} … {balance[8 - WIDTH // 2 :]}"
        left = (
            f"{INDENT}{amount(self.memory - self.room)} are left to the allocator and to libraries"
        )
        lines = [
            f"balance     {balance}",
            f"chunks      {self.chunks}, each a micro-batch of {setup.sizes[0]}",
            f"checkpoint  {self.checkpoint}",
            f"schedule    {setup.lists.name}",
            f"step        {duration(best.seconds)} predicted, {figure(setup.batch_size / best.seconds)} samples/s",
            f"{INDENT}no balance, chunks or checkpoint can be "
            + (f"more than {self.gap:.1%} faster" if self.gap >= 0.0005 else "faster"),
            f"bubble      {best.bubble:.1%} of the devices' time",
            f"memory      at most {amount(best.peak)} of {amount(self.memory)} on a device, allocated to tensors",
            *([left] if self.room < self.memory else []),
            fill(
                f"predicted, not measured: {self.source}",
                WIDTH,
                initial_indent=INDENT,
                subsequent_indent=INDENT,
            ),
        ]
        return "\n".join(lines)

    def _devices(self) -> str:
        """Return a table of what each device holds."""
        setup = self.best.setup
        lines = ["device  layers  model+grads  optimizer  stashed  working  copies    total"]
        for j, device in enumerate(self.best.devices):
            layers = "+".join(
                [
                    str(k)
                    for k, d in zip(setup.balance, setup.lists.placement, strict=True)
                    if d == j
                ]
            )
            model, optimizer = (
                device.parameters + device.gradients,
                device.optimizer + device.update,
            )
            cells = (
                model,
                optimizer,
                device.stashed,
                device.working,
                device.copies + device.skips,
                device.peak,
            )
            widths = zip(cells, (13, 11, 9, 9, 8, 9), strict=True)
            lines.append(
                f"{j:>6}  {layers:>6}"
                + "".join(f"{cell / GiB:>{width}.2f}" for cell, width in widths)
            )
        return "\n".join([*lines, "(GiB, at each device's fullest moment)"])

    def _numbers(self) -> str:
        """Return a table of the best setup for each number of devices, and of data parallel training on as many."""
        batch_size = self.best.setup.batch_size
        lines = ["devices  samples/s  chunks   checkpoint    GiB  bubble  | data parallel    GiB"]
        for (n, found), other in zip(self.by_devices.items(), self.beside, strict=True):
            cells = f"{'no room':>9}"
            if (each := found.best) is not None:
                cells = (
                    f"{figure(batch_size / each.seconds):>9}{len(each.setup.sizes):>8}{each.setup.checkpoint:>13}"
                    f"{each.peak / GiB:>7.2f}{each.bubble:>8.1%}"
                )
            rate = figure(batch_size / other.seconds) if other.peak <= self.room else "no room"
            lines.append(f"{n:>7}  {cells:<45}  |{rate:>14}{other.peak / GiB:>7.2f}")
        words = (
            "(GiB of the fullest device. Data parallel: the whole model and a share of the batch on each device, "
            "nothing recomputed; on one device that is plain training)"
        )
        return "\n".join([*lines, fill(words, WIDTH)])

    @property
    def reason(self) -> str:
        """What holds the plan back, in a sentence or two: what the bubble takes, what more samples or memory would do.

        The last one is on data parallel training, where that has room and is faster.
        """
        best, n = self.best, len(self.best.devices)
        sentences = [self._bubble()]
        if best.seconds > self.by_devices[n].unlimited * (1 + MUCH):
            faster = best.seconds / self.by_devices[n].unlimited - 1
            sentences.append(
                f"Memory is in the way: with enough of it, n = {n} would be {faster:.0%} faster."
            )
        faster_ways = [
            each
            for each in self.beside
            if each.peak <= self.room and each.seconds * 1.005 < best.seconds
        ]
        if faster_ways:
            other = min(faster_ways, key=lambda each: each.seconds)
            gain = best.seconds / other.seconds - 1
            sentences.append(
                f"Data parallel training on {len(other.devices)} devices has room, and is {gain:.0%} faster: take "
                "DistributedDataParallel in place of a pipeline."
            )
        return " ".join(filter(None, sentences))

    def _bubble(self) -> str:
        best, n, setup = self.best, len(self.best.devices), self.best.setup
        fewer = max(
            (len(each.devices) for each in self.candidates if len(each.devices) < n), default=None
        )
        if len(self.by_devices) == 1:
            return f"The bubble takes {best.bubble:.0%}." if n > 1 else ""
        if n == 1:
            text = "Of pipelines, one device is the fastest: what a second one saves,"
            return f"{text} it loses to the bubble and to copies."
        chunks = 2 * len(setup.sizes)
        most = getattr(setup.schedule, "micro_batches", chunks)
        more = replace(setup, batch_size=2 * setup.batch_size, chunks=min(chunks, most))
        text = f"At n = {n} the bubble takes {best.bubble:.0%}"
        if (doubled := assess(self.predictor, more)).peak > self.room:
            return f"{text}; twice the batch has no room with this balance."
        larger = 2 * best.seconds / doubled.seconds - 1
        if fewer is None:
            return f"{text}; twice the batch would bring {larger:.0%} more samples/s."
        slower = next(each for each in self.candidates if len(each.devices) == fewer)
        device = (slower.seconds / best.seconds) ** (1 / (n - fewer)) - 1
        helps = (
            "twice the batch would help more than the last device does"
            if larger > device
            else "the last device helps more than twice the batch would"
        )
        return (
            f"{text}: {helps} (samples/s: {larger:+.0%} by the batch, {device:+.0%} by the device)."
        )
