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
from torchgpipe.plan.predict.setup import Setup
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
        size: The number of samples in each of these micro-batches.
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
        micro_batches: How many micro-batches the device trains on.
        size: The number of samples in a micro-batch.
        recomputed: Whether activations are recomputed.
        units: The number of layers in each unit. A unit is a group of consecutive layers, which are
            recomputed together, or whose parameters are gathered together.
    """

    predictor: Predictor
    optimizer: Optimizer
    devices: int
    micro_batches: int
    size: int
    recomputed: bool
    units: tuple[int, ...]

    @property
    def parameters(self) -> float:
        """The bytes of all parameters of the model that get gradients."""
        return float(sum([layer.parameters for layer in self.predictor.counts.once]))

    @property
    def forward(self) -> float:
        """The seconds of a micro-batch's forward."""
        layers = self.predictor.layers(self.size)
        seconds = sum(layers.forward if self.recomputed else layers.graph)
        return self._slowed(seconds + self.predictor.loss(self.size).forward)

    @property
    def backward(self) -> float:
        """The seconds of one micro-batch's recomputation (if any) and backward."""
        layers = self.predictor.layers(self.size)
        again = sum(layers.graph) if self.recomputed else 0.0
        return self._slowed(again + sum(layers.backward) + self.predictor.loss(self.size).backward)

    @property
    def added(self) -> float:
        """The seconds of adding one micro-batch's gradients to those of earlier micro-batches."""
        return self._slowed(sum(self.predictor.layers(self.size).accumulate))

    def _slowed(self, seconds: float) -> float:
        """Return the seconds that work takes if all devices do it at once and slow each other down.

        `seconds` is how long the work takes on one device alone.
        """
        return seconds * (1 + self.predictor.hardware.sharing * (self.devices - 1))

    def memory(self, optimizer: Optimizer, units: tuple[int, ...], most: int) -> DeviceBytes:
        """Return the bytes that a device has allocated when its memory is fullest.

        The device has the whole model, as in data parallel training.

        Args:
            optimizer: The memory that the optimizer takes.
            units: The number of layers in each unit; a recomputation runs one unit at a time.
            most: How many micro-batches to look at, at most. Further micro-batches need no more
                memory.
        """
        m = min(most, self.micro_batches)
        mode: Mode = "always" if self.recomputed else "never"
        setup = Setup(m * self.size, units, m, mode, optimizer, schedule=_in_turn(len(units), m))
        counts = self.predictor.counts.on_one_device
        (device,) = setup_memory(counts, setup)
        inputs = counts.input * (self.micro_batches - m) * self.size
        return device._replace(parameters=device.parameters + inputs)

    def update(self, parameters: float) -> float:
        """Return the seconds of the optimizer's step if each device updates `parameters` bytes."""
        setup = Setup(self.size, self.units, optimizer=self.optimizer)
        return self.predictor.update(setup, [parameters] * self.devices)

    def found(self, way: Way, seconds: float, memory: DeviceBytes) -> Alternative:
        """Return the prediction for this share."""
        m, size = self.micro_batches, self.size
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
            for m, size in _micro_batches(math.ceil(batch_size / devices)):
                share = _Share(predictor, optimizer, devices, m, size, recomputed, units)
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


def _micro_batches(share: int) -> Iterator[tuple[int, int]]:
    """Yield the ways to split one device's samples into micro-batches, as pairs (number, size).

    The first pair has one micro-batch. Each further size is about half of the previous size, down
    to one sample.
    """
    size = share
    while True:
        yield math.ceil(share / size), size
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
    m = share.micro_batches
    exchange = all_reduce(hardware, parameters, share.devices)
    seconds = m * (share.forward + share.backward) + (m - 1) * share.added
    seconds += max(0.0, exchange - share.backward) + share.update(parameters)
    return share.found("data parallel", seconds, memory)


def fully_sharded(share: _Share) -> Alternative:
    """Predict FSDP (ZeRO-3)."""
    k, m, predictor = share.devices, share.micro_batches, share.predictor
    gather = scatter = 0.0
    for start, stop in pairwise(accumulate(share.units, initial=0)):
        unit = counted_once(predictor.counts.low[start:stop])
        trained = sum([layer.parameters for layer in unit])
        held = trained + sum([layer.frozen for layer in unit])
        gather += (k - 1) * predictor.hardware.transfer(held / k)
        scatter += (k - 1) * predictor.hardware.transfer(trained / k)
    forward = max(share.forward, gather)
    backward = max(share.backward, gather + scatter)
    seconds = m * (forward + backward) + (m - 1) * share.added / k
    seconds += share.update(share.parameters / k)
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
    whole = share.memory(STATELESS, share.units, most=1)
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
