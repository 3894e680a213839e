"""Predict data parallel training, to be seen beside a pipeline: every device has the model, and a share of the batch.

Gradients are summed over the devices by a ring all-reduce, which sends 2 (k - 1) / k of their bytes from each of k
devices to the next (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009).
The all-reduce overlaps with backward, as in `DistributedDataParallel`, which keeps a second copy of the gradients for
it. On one device this is plain training.
"""

from dataclasses import dataclass
from math import ceil

from torchgpipe.plan.count.optimizer import Optimizer
from torchgpipe.plan.memory import setup_memory
from torchgpipe.plan.predict import Predictor, Setup


@dataclass(frozen=True)
class DataParallel:
    """What data parallel training on so many devices is predicted to take: seconds, and bytes of each device."""

    devices: int
    seconds: float
    peak: float


def data_parallel(predictor: Predictor, batch_size: int, devices: int, optimizer: Optimizer) -> DataParallel:
    """Predict data parallel training; the devices' shares are as equal as can be, and nothing is recomputed."""
    setup = Setup(ceil(batch_size / devices), (len(predictor.counts),), 1, "never", optimizer)
    step, (device,) = predictor.step(setup), setup_memory(predictor.counts, setup)
    if devices == 1:
        return DataParallel(1, step.seconds, device.peak)
    seconds = step.seconds * (1 + predictor.hardware.sharing * (devices - 1))
    gradients = float(sum(layer.parameters for layer in predictor.counts.low))
    sends = 2 * (devices - 1)
    exchange = sends * predictor.hardware.transfer(gradients / devices)
    backward = sum(event.end - event.start for event in step.timeline.tasks if event.kind == "backward")
    return DataParallel(devices, seconds + max(0.0, exchange - backward), device.peak + gradients)
