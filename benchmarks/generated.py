"""Models made up from a seed: layers of uneven width and cost, some of them nested, with skips over any distance."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.skip import Namespace, pop, skippable, stash

__all__ = ["Case", "generate"]


@skippable(stash=["skip"])
class Stash(nn.Module):
    """Stash the input, and return it."""

    def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
        yield stash("skip", x)
        return x


@skippable(pop=["skip"])
class Join(nn.Module):
    """Add a skip of whatever shape."""

    def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
        skip: Tensor = yield pop("skip")
        return x + (skip.mean() if skip.shape != x.shape else skip)


@dataclass(frozen=True)
class Case:
    """A model on `meta`, and how it is to be trained on what."""

    module: nn.Sequential
    sample: Tensor
    batch_size: int
    devices: int
    hardware: str
    optimizer: str
    room: float | None
    """Each device's memory, as a share of what the whole model needs on one."""


def generate(seed: int, *, layers: tuple[int, int] = (6, 40)) -> Case:
    """Return the case of this seed, whose model has so many layers, skips apart."""
    random = Random(seed)
    with torch.device("meta"):
        made, shape = (_images if random.random() < 0.5 else _features)(random, random.randint(*layers))
    for _ in range(random.choice([0, 0, 1, 2, 4])):
        _skip(random, made)
    return Case(
        module=nn.Sequential(*made),
        sample=torch.empty(2, *shape, device="meta"),
        batch_size=random.choice([16, 32, 60, 128, 256]),
        devices=random.choice([2, 3, 4, 8]),
        hardware=random.choice(["p40x8", "v100x8", "a100x8", "h100x8"]),
        optimizer=random.choice(["sgd", "momentum", "adam"]),
        room=random.choice([None, None, 0.7, 0.4]),
    )


def _features(random: Random, count: int) -> tuple[list[nn.Module], tuple[int, ...]]:
    """Layers of a language model or a perceptron, on a sequence of vectors."""
    width = first = random.choice([256, 512, 1024])
    made: list[nn.Module] = []
    for _ in range(count):
        kind = random.randrange(6)
        if kind == 0:
            wider = random.choice([256, 512, 1024, 4096])
            made.append(nn.Linear(width, wider))
            width = wider
        elif kind == 1:
            inner = random.choice([1, 2, 4]) * width
            made.append(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width)))
        else:
            made.append(random.choice([nn.LayerNorm(width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, width)]))
    return made, (random.choice([16, 128, 512]), first)


def _images(random: Random, count: int) -> tuple[list[nn.Module], tuple[int, ...]]:
    """Layers of a convolutional network, whose images become smaller on the way."""
    channels, size = random.choice([16, 32, 64]), random.choice([32, 64, 128])
    made: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1)]
    image = (3, size, size)
    for _ in range(count):
        kind = random.randrange(7)
        if kind == 0 and size > 8:
            made.append(nn.MaxPool2d(2))
            size //= 2
        elif kind == 1:
            wider, kernel = min(512, channels * 2), random.choice([1, 3])
            made.append(nn.Conv2d(channels, wider, kernel, padding=kernel // 2))
            channels = wider
        elif kind == 2:
            inner = max(8, channels // random.choice([1, 4]))
            made.append(nn.Sequential(nn.Conv2d(channels, inner, 1), nn.BatchNorm2d(inner), nn.ReLU(),
                                      nn.Conv2d(inner, channels, 3, padding=1)))  # fmt: skip
        else:
            same = nn.Conv2d(channels, channels, 3, padding=1)
            made.append(random.choice([nn.BatchNorm2d(channels), nn.ReLU(), same]))
    return made, image


def _skip(random: Random, made: list[nn.Module]) -> None:
    """Put a skip between two places."""
    a, b = sorted(random.sample(range(1, len(made) + 1), 2))
    space = Namespace()
    made.insert(b, Join().isolate(space))  # type: ignore[operator]
    made.insert(a, Stash().isolate(space))  # type: ignore[operator]
