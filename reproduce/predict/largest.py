"""Find the largest model that fits a number of devices, naive and pipelined: the papers' own question."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from reproduce import models
from reproduce.models.counted import counted
from torchgpipe.plan import Hardware, Impossible
from torchgpipe.plan.count.count import Counts
from torchgpipe.plan.count.optimizer import optimizer_named
from torchgpipe.plan.predict import Predictor
from torchgpipe.plan.search.search import search
from torchgpipe.tensors.checkpoint import Mode

# what it is called -> the model, the papers' batch size, optimizer
MODELS = {
    "amoebanet": ("AmoebaNet-D", 128, "rmsprop"),
    "unet": ("U-Net", 32, "sgd"),
    "resnet101": ("ResNet-101", 128, "sgd"),
}
STEPS = {"amoebanet": (3, 16), "unet": (1, 8)}
"""By which sizes grow."""
MOST = {"amoebanet": (384, 8192), "unet": (384, 4096)}
"""Where the search ends."""
MODES: dict[str, Mode] = {"naive": "never", "pipelined": "except_last"}


@dataclass(frozen=True)
class Asked:
    """What has to fit where: a model by its name here, its sizes, and how it is trained on how many devices."""

    model: str
    sizes: tuple[int, ...]
    batch_size: int
    devices: int
    memory: float
    """What tensors may take of each device."""
    optimizer: str
    hardware: Hardware


@dataclass(frozen=True)
class Largest:
    """The largest sizes that fit, and the next that do not; `None` where there are none."""

    sizes: tuple[int, ...] | None
    beyond: tuple[int, ...] | None
    parameters: int
    """How many the model has."""


def largest(asked: Asked, how: str, axis: int, notice: Callable[[tuple[int, ...]], None]) -> Largest:
    """Double one size from the one that was asked for until it does not fit, then bisect; `notice` gets each try."""
    step, most = STEPS[asked.model][axis], MOST[asked.model][axis]

    def sizes(steps: int) -> tuple[int, ...]:
        return tuple(steps * step if i == axis else size for i, size in enumerate(asked.sizes))

    def fits(steps: int) -> bool:
        notice(sizes(steps))
        return _fits(asked, how, sizes(steps))

    low, high = 0, max(1, asked.sizes[axis] // step)  # low fits, high does not
    while fits(high):
        low, high = high, 2 * high
        if high * step > most:
            return Largest(sizes(low), None, _parameters(asked, sizes(low)))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return Largest(sizes(low), sizes(high), _parameters(asked, sizes(low))) if low else Largest(None, sizes(high), 0)


def _fits(asked: Asked, how: str, sizes: tuple[int, ...]) -> bool:
    predictor = Predictor(_counts(asked.model, sizes), asked.hardware)
    try:
        search(
            predictor,
            batch_size=asked.batch_size,
            memory=asked.memory,
            optimizer=optimizer_named(asked.optimizer, foreach=not asked.hardware.cpu),
            chunks=[1] if how == "naive" else [asked.batch_size],
            checkpoint=[MODES[how]],
            close=inf,
            partitions=[min(asked.devices, len(predictor.counts))],
        )
    except Impossible:
        return False
    return True


def _parameters(asked: Asked, sizes: tuple[int, ...]) -> int:
    return sum(layer.parameters for layer in _counts(asked.model, sizes).low) // 4


def _counts(model: str, sizes: tuple[int, ...]) -> Counts:
    name, *_ = MODELS[model]
    return counted(name, sizes, models.MODELS[name].input_shape)
