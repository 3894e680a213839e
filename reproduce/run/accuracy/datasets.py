"""Yield mini-batches of ImageNet or of generated images. The same seed and epoch always give the same mini-batches.

The order and the crops of an epoch depend only on the seed and the epoch's number. So a resumed training gets the data
that it would have had without the interruption, and no state of the data has to be saved.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from reproduce.error import Error
from reproduce.experiments.recipe import AccuracyScale
from reproduce.models.resnet import import_torchvision

Batch = tuple[Tensor, Tensor]  # images (N, 3, H, W) and classes (N,), on the CPU

LAYOUT = "train/<class>/*.JPEG and val/<class>/*.JPEG"
MEAN, DEVIATION = (
    (0.485, 0.456, 0.406),
    (0.229, 0.224, 0.225),
)  # of ImageNet's channels; not stated in the publication
MOST_EPOCHS = 100_003  # with fewer epochs, no two trainings use the same seed for an epoch


class AccuracyNeeds(NamedTuple):
    """Hold what only accuracy experiments need: the data, and the seeds. Each row is trained once per seed."""

    data: Gratings | ImageNet
    seeds: range


def prepare(
    name: str, scale: AccuracyScale, folder: Path | None, seed: int, seeds: int | None
) -> AccuracyNeeds:
    """Find the experiment's data in `folder`, or generate them if the scale says how; raise `Error` if they are bad."""
    trained = range(seed, seed + (seeds or scale.seeds))
    if scale.made is not None:
        if folder is not None:
            raise Error(f"--data {folder}: scale {scale.name} makes its own data; leave --data out")
        return AccuracyNeeds(Gratings(**scale.made, seed=seed), trained)
    if folder is None:
        raise Error(
            f"{name} at scale {scale.name} trains on ImageNet: name its folder by --data DIR, "
            f"which must have {LAYOUT}; or use --scale small"
        )
    row = scale.rows[0]
    return AccuracyNeeds(
        ImageNet(folder, row.num_classes, dict(row.data)["dataloader_workers"]), trained
    )


class Gratings:
    """Generate a data set of noisy waves. The class is the direction of the wave.

    Each image has a random phase, wavelength and colour, so no single pixel reveals the class: a network must learn
    directions. Neighbouring classes are `180 / classes` degrees apart. Training images are cropped at random,
    validation images in the middle.
    """

    def __init__(
        self, train_size: int, val_size: int, classes: int, image_size: int, noise: float, seed: int
    ) -> None:
        """Generate all images. `noise` is the standard deviation of the noise; the largest amplitude of a wave is 1."""
        self.train_size, self.val_size, self.image_size, self.margin = (
            train_size,
            val_size,
            image_size,
            image_size // 8,
        )
        generator = torch.Generator().manual_seed(seed)
        self.train = self._draw(train_size, classes, noise, generator)
        self.val = self._draw(val_size, classes, noise, generator)

    def _draw(self, count: int, classes: int, noise: float, generator: torch.Generator) -> Batch:
        labels = torch.arange(count) % classes  # equally many of each; `train_batches` shuffles

        def uniform(low: float, high: float, *shape: int) -> Tensor:
            return low + (high - low) * torch.rand(count, *shape, generator=generator)

        angle = (labels * (math.pi / classes)).view(-1, 1, 1)
        wavelength, phase = uniform(5, 9, 1, 1), uniform(0, 2 * math.pi, 1, 1)
        place = torch.arange(self.image_size + self.margin, dtype=torch.float32)
        along = place.view(1, 1, -1) * angle.cos() + place.view(1, -1, 1) * angle.sin()
        wave = torch.sin(2 * math.pi * along / wavelength + phase).unsqueeze(1)
        images = wave * uniform(-1, 1, 3, 1, 1)
        return images + noise * torch.randn(images.shape, generator=generator), labels

    def train_batches(self, batch_size: int, seed: int, epoch: int) -> Iterator[Batch]:
        """Yield one epoch's mini-batches of equal size, shuffled and randomly cropped; an incomplete one is dropped."""
        generator = torch.Generator().manual_seed(seed * MOST_EPOCHS + epoch)
        images, labels = self.train
        order = torch.randperm(self.train_size, generator=generator)
        for chosen in order[: self.train_size // batch_size * batch_size].split(batch_size):
            corners = torch.randint(self.margin + 1, (batch_size, 2), generator=generator).tolist()
            crops = [
                self._crop(images[i], *corner)
                for i, corner in zip(chosen.tolist(), corners, strict=True)
            ]
            yield torch.stack(crops), labels[chosen]

    def val_batches(self, batch_size: int) -> Iterator[Batch]:
        """Yield all validation images, cropped in the middle. The last mini-batch may be smaller."""
        images, labels = self.val
        middle = self.margin // 2
        yield from zip(
            self._crop(images, middle, middle).split(batch_size),
            labels.split(batch_size),
            strict=True,
        )

    def _crop(self, image: Tensor, top: int, left: int) -> Tensor:
        return image[..., top : top + self.image_size, left : left + self.image_size]


class ImageNet:
    """Read images from a folder of the layout `LAYOUT`, one subfolder per class, with `workers` processes.

    Training images are cropped at random to 224 x 224 (8 to 100 % of the area) and flipped at random; validation images
    are resized to 256 and cropped in the middle, as published.
    If there is no such folder, it has another layout, or torchvision is missing, it raises `Error`.
    """

    def __init__(self, folder: Path, classes: int, workers: int) -> None:
        transforms = import_torchvision("transforms", "ImageNet")
        train = [
            transforms.RandomResizedCrop(224, scale=(0.08, 1.0)),
            transforms.RandomHorizontalFlip(),
        ]
        val = [transforms.Resize(256), transforms.CenterCrop(224)]
        normalize = [transforms.ToTensor(), transforms.Normalize(MEAN, DEVIATION)]
        self.workers = workers
        self.train = find_images(folder, "train", classes, transforms.Compose([*train, *normalize]))
        self.val = find_images(folder, "val", classes, transforms.Compose([*val, *normalize]))
        self.train_size, self.val_size = len(self.train), len(self.val)
        if missing := sorted({*self.train.classes} - {*self.val.classes}):
            raise Error(
                f"--data {folder}: val/ has no folder {missing[0]}, and train/ has; put it there"
            )

    def train_batches(self, batch_size: int, seed: int, epoch: int) -> Iterator[Batch]:
        """Yield one epoch's mini-batches, as `Gratings` does."""
        return self._read(self.train, batch_size, seed * MOST_EPOCHS + epoch, train=True)

    def val_batches(self, batch_size: int) -> Iterator[Batch]:
        """Yield all validation images."""
        return self._read(self.val, batch_size, 0, train=False)

    def _read(self, images: Any, batch_size: int, seed: int, *, train: bool) -> Iterator[Batch]:
        loader = torch.utils.data.DataLoader(
            images,
            batch_size=batch_size,
            num_workers=self.workers,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=ignore_interrupts,
            generator=torch.Generator().manual_seed(
                seed
            ),  # else it would draw from the default generator
            shuffle=train,
            drop_last=train,
        )
        try:
            yield from loader
        except Error as error:  # from a worker: the message is the last line of a traceback
            raise Error(
                str(error).splitlines()[-1].removeprefix("reproduce.error.Error: ")
            ) from None


def ignore_interrupts(worker: int) -> None:
    """Ignore Ctrl-C in a worker process. Every process gets it, and the main one ends the workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def find_images(folder: Path, part: str, classes: int, transform: Any) -> Any:
    """Return the images below `folder/part` as a torchvision `ImageFolder`, or raise `Error`."""
    try:
        found = import_torchvision("datasets", "ImageNet").ImageFolder(
            str(folder / part), transform, loader=load_image
        )
        if len(found.classes) == classes:
            return found
        problem = f"has {len(found.classes)} folders of classes, not {classes}"
    except OSError as error:
        problem = f"cannot be used ({error.strerror or str(error).partition('. Supported')[0]})"
    raise Error(f"--data {folder}: {part}/ {problem}; put ImageNet there as {LAYOUT}")


def load_image(path: str) -> Any:
    """Load an RGB image. The error names the file, which torchvision's would not."""
    from PIL import Image

    try:
        with Image.open(path) as opened:
            return opened.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise Error(f"{path} cannot be read as an image: put the file there anew") from error
