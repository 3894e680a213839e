"""Yield mini-batches of ImageNet or of generated images.

The order of the images and their random crops depend only on the seed and the number of the epoch.
So a training that is resumed at an epoch gets the same data as a training without interruption, and
a saved training need not contain any state of the data.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor
from torch.utils.data import DataLoader

from reproduce.error import Error
from reproduce.experiments.recipe import AccuracyScale
from reproduce.models.resnet import import_torchvision

Batch = tuple[Tensor, Tensor]  # images (N, 3, H, W) and classes (N,), on the CPU

LAYOUT = "train/<class>/*.JPEG and val/<class>/*.JPEG"
# The means and standard deviations of ImageNet's channels. The publication does not state them.
MEAN = (0.485, 0.456, 0.406)
DEVIATION = (0.229, 0.224, 0.225)
MOST_EPOCHS = 100_003  # with fewer epochs, no two trainings use the same seed for an epoch


class AccuracyNeeds(NamedTuple):
    """The data and the seeds of an accuracy experiment.

    Each row (configuration) of the experiment is trained once with each seed.
    """

    data: Gratings | ImageNet
    seeds: range


def prepare(
    name: str, scale: AccuracyScale, folder: Path | None, seed: int, seeds: int | None
) -> AccuracyNeeds:
    """Return the data and the seeds of an accuracy experiment at a scale (a set of sizes).

    If the scale has settings for generated images, generate these images. Otherwise, use ImageNet.

    Args:
        name: The name of the experiment, for error messages.
        scale: The scale of the experiment.
        folder: The folder of ImageNet; None to generate images.
        seed: The first seed. It is also the seed of the generated images.
        seeds: The number of seeds; None for the scale's number.

    Raises:
        Error: The scale and `folder` do not fit together, or `folder` cannot be used.
    """
    trained = range(seed, seed + (seeds or scale.seeds))
    if scale.made is not None:
        if folder is not None:
            raise Error(
                f"--data {folder}: the scale {scale.name} trains on images that it generates; "
                "leave --data out"
            )
        gratings = Gratings(**scale.made, seed=seed)
        return AccuracyNeeds(gratings, trained)
    if folder is None:
        raise Error(
            f"{name} at scale {scale.name} trains on ImageNet: name its folder by --data DIR, "
            f"which must have {LAYOUT}; or use --scale small, which generates its own images"
        )
    row = scale.rows[0]
    reading = dict(row.data)
    images = ImageNet(folder, row.num_classes, reading["dataloader_workers"])
    return AccuracyNeeds(images, trained)


class Gratings:
    """A generated data set of images of noisy waves. The class is the direction of the wave.

    Each image has a random phase, wavelength and colour. So no single pixel reveals the class, and
    a network must learn directions. Neighbouring classes are `180 / classes` degrees apart.
    Training images are cropped at random, and validation images are cropped in the middle.
    """

    def __init__(  # noqa: PLR0913 - all that the data depend on
        self, train_size: int, val_size: int, classes: int, image_size: int, noise: float, seed: int
    ) -> None:
        """Generate all images.

        Args:
            train_size: The number of training images.
            val_size: The number of validation images.
            classes: The number of classes.
            image_size: The width and height of the cropped images.
            noise: The standard deviation of the noise. The largest amplitude of a wave is 1.
            seed: The seed of all random numbers.
        """
        self.train_size = train_size
        self.val_size = val_size
        self.image_size = image_size
        self.margin = image_size // 8
        generator = Generator().manual_seed(seed)
        self.train = self._draw(train_size, classes, noise, generator)
        self.val = self._draw(val_size, classes, noise, generator)

    def _draw(self, count: int, classes: int, noise: float, generator: Generator) -> Batch:
        labels = torch.arange(count) % classes  # equally many of each; `train_batches` shuffles

        def uniform(low: float, high: float, *shape: int) -> Tensor:
            return low + (high - low) * torch.rand(count, *shape, generator=generator)

        angle = (labels * (math.pi / classes)).view(-1, 1, 1)
        wavelength = uniform(5, 9, 1, 1)
        phase = uniform(0, 2 * math.pi, 1, 1)
        place = torch.arange(self.image_size + self.margin, dtype=torch.float32)
        x = place.view(1, 1, -1)
        y = place.view(1, -1, 1)
        along = x * angle.cos() + y * angle.sin()
        wave = torch.sin(2 * math.pi * along / wavelength + phase)
        colour = uniform(-1, 1, 3, 1, 1)
        images = wave.unsqueeze(1) * colour
        disturbance = torch.randn(images.shape, generator=generator)
        return images + noise * disturbance, labels

    def train_batches(self, batch_size: int, seed: int, epoch: int) -> Iterator[Batch]:
        """Yield the mini-batches of one epoch, shuffled and randomly cropped.

        If fewer than `batch_size` images are left at the end, they are dropped.
        """
        generator = Generator().manual_seed(seed * MOST_EPOCHS + epoch)
        images, labels = self.train
        order = torch.randperm(self.train_size, generator=generator)
        complete = self.train_size // batch_size * batch_size
        for chosen in order[:complete].split(batch_size):
            corners = torch.randint(self.margin + 1, (batch_size, 2), generator=generator)
            crops = []
            for image, (top, left) in zip(images[chosen], corners.tolist(), strict=True):
                crop = self._crop(image, top, left)
                crops.append(crop)
            yield torch.stack(crops), labels[chosen]

    def val_batches(self, batch_size: int) -> Iterator[Batch]:
        """Yield mini-batches of all validation images, cropped in the middle.

        The last mini-batch can be smaller than the others.
        """
        images, labels = self.val
        middle = self.margin // 2
        cropped = self._crop(images, middle, middle)
        yield from zip(cropped.split(batch_size), labels.split(batch_size), strict=True)

    def _crop(self, image: Tensor, top: int, left: int) -> Tensor:
        bottom = top + self.image_size
        right = left + self.image_size
        return image[..., top:bottom, left:right]


class ImageNet:
    """ImageNet in a folder of the layout `LAYOUT`, read by `workers` processes.

    As in the published experiment, images become 224 x 224:

    - From a training image, a random part (8 to 100 % of the area) is cut out, resized, and flipped
      at random.
    - A validation image is resized so that its shorter side has 256 pixels, and cropped in the
      middle.

    The constructor raises `Error` if there is no such folder, if the folder has another layout, or
    if torchvision is missing.
    """

    def __init__(self, folder: Path, classes: int, workers: int) -> None:
        transforms = import_torchvision("transforms", "ImageNet")
        crop_at_random = transforms.RandomResizedCrop(224, scale=(0.08, 1.0))
        flip_at_random = transforms.RandomHorizontalFlip()
        resize = transforms.Resize(256)
        crop = transforms.CenterCrop(224)
        to_tensor = transforms.ToTensor()
        normalize = transforms.Normalize(MEAN, DEVIATION)
        train = transforms.Compose([crop_at_random, flip_at_random, to_tensor, normalize])
        val = transforms.Compose([resize, crop, to_tensor, normalize])

        self.workers = workers
        self.train = find_images(folder, "train", classes, train)
        self.val = find_images(folder, "val", classes, val)
        self.train_size = len(self.train)
        self.val_size = len(self.val)
        missing = set(self.train.classes) - set(self.val.classes)
        if missing:
            first = min(missing)
            raise Error(
                f"--data {folder}: train/ has a folder of the class {first}, but val/ has none; "
                "add this folder to val/"
            )

    def train_batches(self, batch_size: int, seed: int, epoch: int) -> Iterator[Batch]:
        """Yield the complete mini-batches of one epoch, shuffled and randomly cropped."""
        return self._read(self.train, batch_size, seed * MOST_EPOCHS + epoch, train=True)

    def val_batches(self, batch_size: int) -> Iterator[Batch]:
        """Yield mini-batches of all validation images."""
        return self._read(self.val, batch_size, 0, train=False)

    def _read(self, images: Any, batch_size: int, seed: int, *, train: bool) -> Iterator[Batch]:
        own_generator = Generator().manual_seed(seed)  # else the default generator would be used
        loader = DataLoader(
            images,
            batch_size=batch_size,
            num_workers=self.workers,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=ignore_interrupts,
            generator=own_generator,
            shuffle=train,
            drop_last=train,
        )
        try:
            yield from loader
        except Error as error:  # from a worker: the message is the last line of a traceback
            last = str(error).splitlines()[-1]
            raise Error(last.removeprefix("reproduce.error.Error: ")) from None


def ignore_interrupts(worker: int) -> None:
    """Ignore Ctrl-C in a worker process, and end at SIGTERM.

    A terminal sends Ctrl-C to every process. But only the main process handles it, and ends the
    workers by SIGTERM. Without this function, a worker would use the handlers of the main process,
    which are made to save results.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def find_images(folder: Path, part: str, classes: int, transform: Any) -> Any:
    """Return the images in `folder/part` as a torchvision `ImageFolder`.

    Raise `Error` if the folder cannot be read, or if the number of its classes is not `classes`.
    """
    datasets = import_torchvision("datasets", "ImageNet")
    try:
        found = datasets.ImageFolder(str(folder / part), transform, loader=load_image)
    except OSError as error:
        said, _, _ = str(error).partition(". Supported")
        problem = f"cannot be used ({error.strerror or said})"
    else:
        if len(found.classes) == classes:
            return found
        problem = f"has {len(found.classes)} folders of classes, not {classes}"
    raise Error(f"--data {folder}: {part}/ {problem}; put ImageNet there as {LAYOUT}")


def load_image(path: str) -> Any:
    """Load an image as RGB. If that fails, the error names the file, unlike torchvision's error."""
    from PIL import Image

    try:
        with Image.open(path) as opened:
            return opened.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise Error(f"{path} cannot be read as an image: replace the file") from error
