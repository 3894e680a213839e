"""Predict data parallel training and FSDP, to compare a pipeline with training without one.

Each of k devices trains on an equal share of the batch. The share is split into micro-batches,
whose gradients are added up (gradient accumulation). The predictions make these assumptions:

- Data parallel. Every device has the whole model. A ring all-reduce sums the gradients once a step.
  As in `DistributedDataParallel`, the all-reduce overlaps with the last backward, and each device
  keeps a second copy of the gradients for the all-reduce. On one device, this is plain training.
- FSDP, or ZeRO-3 (Rajbhandari et al., "ZeRO", 2019, arXiv:1910.02054). Every device keeps 1/k of
  the parameters, of the gradients and of the optimizer's state. Consecutive layers form units. All
  parameters of a unit are gathered before its forward and again before its backward. Its gradients
  are summed and scattered after its backward. In each of these three exchanges, a device receives
  (k - 1)/k of the unit's bytes. The exchanges take place for every micro-batch, and overlap with
  computing. A device holds the gradients of one unit and the parameters of two units, because the
  next unit's parameters are gathered while one unit computes.
- Recomputation. The number of units is about the square root of the number of layers. A unit keeps
  only its inputs, and runs again in the backward (Chen et al., "Training deep nets with sublinear
  memory cost", 2016, arXiv:1604.06174).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal

from torchgpipe.balance.minimise import minimise_heaviest
from torchgpipe.plan.count.optimizer import STATELESS, Optimizer
from torchgpipe.plan.count.tied import counted_once
from torchgpipe.plan.predict.between import all_reduce
from torchgpipe.plan.predict.memory import DeviceBytes, setup_memory
from torchgpipe.plan.predict.predict import Predictor
from torchgpipe.plan.predict.setup import Setup, micro_batch_sizes
from torchgpipe.schedules import Action, Schedule
from torchgpipe.tensors.checkpoint import Mode

Way = Literal["data parallel", "FSDP"]


@dataclass(frozen=True)
class Alternative:
    """A way to train without a pipeline, with its predicted seconds and memory.

    Attributes:
        way: "data parallel" or "FSDP".
        devices: How many devices train.
        micro_batches: How many micro-batches each device trains on in a step.
        size: The number of samples in each of these micro-batches; the last may be smaller.
        recomputed: Whether activations are recomputed in the backward.
        seconds: The seconds of a step.
        memory: The bytes that each device has allocated when its memory is fullest.
    """

    way: Way
    devices: int
    micro_batches: int
    size: int
    recomputed: bool
    seconds: float
    memory: DeviceBytes

    @property
    def peak(self) -> float:
        """The bytes that each device has allocated when its memory is fullest."""
        return self.memory.peak


@dataclass(frozen=True)
class _Share:
    """The work that one device does in a step of training without a pipeline.

    Attributes:
        predictor: The predictor of the model.
        optimizer: The memory that the optimizer takes.
        devices: How many devices there are.
        samples: How many samples the device trains on.
        chunks: How many micro-batches these samples are split into, at most.
        recomputed: Whether activations are recomputed.
        units: The number of layers in each unit. A unit is a group of consecutive layers, which are
            recomputed together, or whose parameters are gathered together.
    """

    predictor: Predictor
    optimizer: Optimizer
    devices: int
    samples: int
    chunks: int
    recomputed: bool
    units: tuple[int, ...]

    @property
    def sizes(self) -> list[int]:
        """The number of samples in each micro-batch. The last one may be smaller."""
        return micro_batch_sizes(self.samples, self.chunks)

    @property
    def parameters(self) -> float:
        """The bytes of all parameters of the model that get gradients."""
        return float(sum([layer.parameters for layer in self.predictor.counts.once]))

    def forward(self, size: int) -> float:
        """Return the seconds of the forward of a micro-batch with `size` samples."""
        layers = self.predictor.layers(size)
        seconds = sum(layers.forward if self.recomputed else layers.graph)
        return self._slowed(seconds + self.predictor.loss(size).forward)

    def backward(self, size: int) -> float:
        """Return the seconds of a micro-batch's recomputation (if any) and backward."""
        layers = self.predictor.layers(size)
        again = sum(layers.graph) if self.recomputed else 0.0
        return self._slowed(again + sum(layers.backward) + self.predictor.loss(size).backward)

    @property
    def added(self) -> float:
        """The seconds of adding the gradients of all micro-batches to those of the first."""
        seconds = 0.0
        for size in self.sizes[1:]:
            seconds += sum(self.predictor.layers(size).accumulate)
        return self._slowed(seconds)

    def _slowed(self, seconds: float) -> float:
        """Return the seconds that work takes if all devices do it at once and slow each other down.

        `seconds` is how long the work takes on one device alone.
        """
        return seconds * (1 + self.predictor.hardware.sharing * (self.devices - 1))

    def memory(
        self, optimizer: Optimizer, units: tuple[int, ...], most: int, *, scattered: bool = False
    ) -> DeviceBytes:
        """Return the bytes that a device has allocated when its memory is fullest.

        The device has the whole model, as in data parallel training.

        Args:
            optimizer: The memory that the optimizer takes.
            units: The number of layers in each unit; a recomputation runs one unit at a time.
            most: How many micro-batches to look at, at most. Further micro-batches need no more
                memory.
            scattered: Whether the gradients of a unit leave the device after its backward.
        """
        sizes = self.sizes[:most]
        m, samples = len(sizes), sum(sizes)
        mode: Mode = "always" if self.recomputed else "never"
        turns = _in_turn(len(units), m)
        setup = Setup(samples, units, m, mode, optimizer, schedule=turns, scattered=scattered)
        counts = self.predictor.counts.on_one_device
        (device,) = setup_memory(counts, setup)
        inputs = counts.input * (self.samples - samples)
        return device._replace(parameters=device.parameters + inputs)

    def update(self, parameters: float) -> float:
        """Return the seconds of the optimizer's step if each device updates `parameters` bytes."""
        setup = Setup(self.sizes[0], self.units, optimizer=self.optimizer)
        return self.predictor.update(setup, [parameters] * self.devices)

    def found(self, way: Way, seconds: float, memory: DeviceBytes) -> Alternative:
        """Return the prediction for this share."""
        m, size = len(self.sizes), self.sizes[0]
        return Alternative(way, self.devices, m, size, self.recomputed, seconds, memory)


@lru_cache(maxsize=64)
def _in_turn(units: int, micro_batches: int) -> Schedule:
    """Return a schedule for one device that runs each micro-batch's forward and backward in turn.

    A micro-batch's forward begins only after the backward of the previous micro-batch, as in
    ordinary gradient accumulation.
    """
    actions: list[Action] = []
    for i in range(micro_batches):
        actions += [Action("forward", i, unit) for unit in range(units)]
        actions += [Action("backward", i, unit) for unit in reversed(range(units))]
    return Schedule("in turn", [0] * units, [actions])


def alternatives(
    predictor: Predictor, batch_size: int, devices: int, optimizer: Optimizer, memory: float
) -> list[Alternative]:
    """Predict data parallel training and, if there are several devices, FSDP.

    For each of these two ways to train, the function tries several numbers of micro-batches, with
    and without recomputation. For each of the two, the result has the fastest prediction that fits
    the memory. If none fits, it has the prediction with the least memory.

    Args:
        predictor: The predictor of the model.
        batch_size: The number of samples in a batch, over all devices.
        devices: How many devices there are.
        optimizer: The memory that the optimizer takes.
        memory: How many bytes tensors may take on each device.
    """
    layers = predictor.layers(2).graph
    count = math.ceil(math.sqrt(len(layers)))
    units = tuple(minimise_heaviest(layers, count))
    ways = [data_parallel, fully_sharded] if devices > 1 else [data_parallel]
    found = []
    for predict in ways:
        tried: list[Alternative] = []
        for recomputed in (False, True):
            samples = math.ceil(batch_size / devices)
            for chunks in _chunks(samples):
                share = _Share(predictor, optimizer, devices, samples, chunks, recomputed, units)
                tried.append(predict(share))
                # Smaller micro-batches need less memory, and are not faster.
                if tried[-1].peak <= memory:
                    break
        fitting = [each for each in tried if each.peak <= memory]
        if fitting:
            found.append(min(fitting, key=lambda each: each.seconds))
        else:
            found.append(min(tried, key=lambda each: each.peak))
    return found


def _chunks(samples: int) -> Iterator[int]:
    """Yield the numbers of micro-batches to split one device's samples into.

    The first number is 1. With each further number, micro-batches have about half as many samples,
    down to one sample.
    """
    size = samples
    while True:
        yield math.ceil(samples / size)
        if size == 1:
            return
        size = math.ceil(size / 2)


def data_parallel(share: _Share) -> Alternative:
    """Predict data parallel training."""
    hardware, parameters = share.predictor.hardware, share.parameters
    # With recomputation, the units are stages: each runs again by itself.
    units = share.units if share.recomputed else (sum(share.units),)
    # All micro-batches after the first take the same memory, so two of them are enough.
    memory = share.memory(share.optimizer, units, most=2)
    if share.devices > 1:
        memory = memory._replace(gradients=memory.gradients + parameters)
    exchange = all_reduce(hardware, parameters, share.devices)
    seconds = share.added + share.update(parameters)
    for size in share.sizes:
        seconds += share.forward(size) + share.backward(size)
    seconds += max(0.0, exchange - share.backward(share.sizes[-1]))
    return share.found("data parallel", seconds, memory)


def fully_sharded(share: _Share) -> Alternative:
    """Predict FSDP (ZeRO-3)."""
    k, predictor = share.devices, share.predictor
    gather = scatter = 0.0
    for start, stop in pairwise(accumulate(share.units, initial=0)):
        unit = counted_once(predictor.counts.low[start:stop])
        trained = sum([layer.parameters for layer in unit])
        held = trained + sum([layer.frozen for layer in unit])
        gather += (k - 1) * predictor.hardware.transfer(held / k)
        scatter += (k - 1) * predictor.hardware.transfer(trained / k)
    seconds = share.added / k + share.update(share.parameters / k)
    for size in share.sizes:
        seconds += max(share.forward(size), gather)
        seconds += max(share.backward(size), gather + scatter)
    return share.found("FSDP", seconds, _sharded_memory(share))


def _sharded_memory(share: _Share) -> DeviceBytes:
    """Return the bytes that a device has allocated with FSDP when its memory is fullest.

    The memory is fullest during the backward, or during the optimizer's step.
    """
    k, optimizer, layers = share.devices, share.optimizer, share.predictor.counts.once
    sizes: list[float] = []
    for layer in layers:
        sizes += layer.parameter_sizes
    trained = sum(sizes)
    held = trained + sum([layer.frozen for layer in layers])
    gathered = 0.0
    for start, stop in pairwise(accumulate(share.units, initial=0)):
        unit = counted_once(share.predictor.counts.low[start:stop])
        gathered = max(gathered, 2.0 * sum([layer.parameters + layer.frozen for layer in unit]))
    # Each micro-batch makes the gradients of a unit anew, as the first one does.
    whole = share.memory(STATELESS, share.units, most=1, scattered=True)
    backward = whole._replace(
        parameters=whole.parameters - held + held / k,
        gradients=trained / k,
        optimizer=optimizer.state * trained / k,
        copies=whole.copies + gathered,
    )
    update = DeviceBytes(
        backward.parameters,
        backward.gradients,
        backward.optimizer,
        update=optimizer.temporaries(sizes) / k,
    )
    return max(backward, update, key=lambda each: each.peak)
