"""Hand out mini-batches for training and for evaluation, the same ones whenever an epoch is asked for again.

What an epoch draws, its order and its crops, follows from the seed and the epoch's number alone. So a training that is
resumed at an epoch sees what it would have seen without the interruption, and nothing of it has to be saved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]  # images (N, 3, H, W) and classes (N,), on the CPU

MOST_EPOCHS = 100_003  # below which two seeds share no epoch's seed


def epoch_seed(seed: int, epoch: int) -> int:
    """Return the seed of an epoch's order and crops."""
    return seed * MOST_EPOCHS + epoch


class Gratings:
    """Make a data set of waves: the class is the direction a wave goes in, and noise lies over it.

    A wave's phase, wavelength and colour are drawn anew for every image, so that no pixel tells the class, and a
    network must learn to see directions. Neighbouring classes are `180 / classes` degrees apart. Training
    images are cut out at a random place, images to evaluate on from the middle.
    """

    def __init__(
        self, *, train_size: int, val_size: int, classes: int, image_size: int, noise: float, seed: int
    ) -> None:
        """Draw all images. `noise` is the standard deviation of each value's noise; the waves' amplitude is 1."""
        self.train_size, self.val_size, self.classes, self.image_size = train_size, val_size, classes, image_size
        generator = torch.Generator().manual_seed(seed)
        self.margin = image_size // 8
        self.train = self._draw(train_size, noise, generator)
        self.val = self._draw(val_size, noise, generator)

    def _draw(self, count: int, noise: float, generator: torch.Generator) -> Batch:
        side = self.image_size + self.margin
        labels = torch.arange(count) % self.classes  # equally many of each; the order is drawn for every epoch

        def uniform(low: float, high: float, *shape: int) -> Tensor:
            return low + (high - low) * torch.rand(count, *shape, generator=generator)

        angle = (labels * (math.pi / self.classes)).view(-1, 1, 1)
        wavelength, phase = uniform(5, 9, 1, 1), uniform(0, 2 * math.pi, 1, 1)
        place = torch.arange(side, dtype=torch.float32)
        along = place.view(1, 1, -1) * angle.cos() + place.view(1, -1, 1) * angle.sin()
        wave = torch.sin(2 * math.pi * along / wavelength + phase).unsqueeze(1)
        images = wave * uniform(-1, 1, 3, 1, 1)
        return images + noise * torch.randn(images.shape, generator=generator), labels

    def train_batches(self, batch_size: int, seed: int, epoch: int) -> Iterator[Batch]:
        """Yield one epoch's mini-batches, in an order and with crops that are drawn for it.

        All are of the same size: what is left over at the end is dropped.
        """
        generator = torch.Generator().manual_seed(epoch_seed(seed, epoch))
        images, labels = self.train
        order = torch.randperm(self.train_size, generator=generator)
        for chosen in order[: self.train_size // batch_size * batch_size].split(batch_size):
            corners = torch.randint(self.margin + 1, (batch_size, 2), generator=generator).tolist()
            crops = [self._crop(images[i], *corner) for i, corner in zip(chosen.tolist(), corners, strict=True)]
            yield torch.stack(crops), labels[chosen]

    def val_batches(self, batch_size: int) -> Iterator[Batch]:
        """Yield all images to evaluate on, cut out from the middle; the last mini-batch may be smaller."""
        images, labels = self.val
        middle = self.margin // 2
        yield from zip(self._crop(images, middle, middle).split(batch_size), labels.split(batch_size), strict=True)

    def _crop(self, image: Tensor, top: int, left: int) -> Tensor:
        return image[..., top : top + self.image_size, left : left + self.image_size]
