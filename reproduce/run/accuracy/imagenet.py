"""Read ImageNet from a folder that the user names, cropped as the publication says."""

from __future__ import annotations

import importlib
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from reproduce.error import USAGE, Error
from reproduce.run.accuracy.datasets import Batch, epoch_seed

LAYOUT = "train/<class>/*.JPEG and val/<class>/*.JPEG"
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's values; not in the publication


class ImageNet:
    """Read the images of a folder laid out as `LAYOUT`, one subfolder for each class.

    Training images are cropped at random to 224 x 224 (8 to 100 % of the area) and flipped at random; images to
    evaluate on are resized to 256 and cropped in the middle. Worker processes, as many as published, read and crop.
    """

    def __init__(self, folder: Path, *, classes: int = 1000, workers: int = 32) -> None:
        """List all files.

        Raises:
            Error: there is no such folder, it is laid out otherwise, or torchvision is missing; in one line.
        """
        transforms = import_torchvision("torchvision.transforms")
        normalize = [transforms.ToTensor(), transforms.Normalize(MEAN, DEVIATION)]
        train = [transforms.RandomResizedCrop(224, scale=(0.08, 1.0)), transforms.RandomHorizontalFlip()]
        val = [transforms.Resize(256), transforms.CenterCrop(224)]
        self.workers = workers
        self.train = find_images(folder, "train", classes, transforms.Compose([*train, *normalize]))
        self.val = find_images(folder, "val", classes, transforms.Compose([*val, *normalize]))
        if self.train.classes != self.val.classes:
            ((name, where),) = _differences(self.train.classes, self.val.classes)[:1]
            raise Error(f"--data {folder}: class {name} is in {where}/ only; both must have the same classes", USAGE)
        self.classes = classes
        self.train_size, self.val_size = len(self.train), len(self.val)

    def train_batches(self, batch_size: int, seed: int, epoch: int) -> Iterator[Batch]:
        """Yield one epoch's mini-batches, in an order and with crops that are drawn for it."""
        generator = torch.Generator().manual_seed(epoch_seed(seed, epoch))
        return iter(self._loader(self.train, batch_size, shuffle=True, drop_last=True, generator=generator))

    def val_batches(self, batch_size: int) -> Iterator[Batch]:
        """Yield all images to evaluate on."""
        # With a generator of its own, or making the loader would draw from the default one.
        return iter(self._loader(self.val, batch_size, generator=torch.Generator().manual_seed(0)))

    def _loader(self, images: Any, batch_size: int, **options: Any) -> Any:
        with warnings.catch_warnings():
            # The number of workers is the published one: crops are drawn per worker.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            return torch.utils.data.DataLoader(
                images,
                batch_size=batch_size,
                num_workers=self.workers,
                pin_memory=torch.cuda.is_available(),
                worker_init_fn=leave_interrupts,
                **options,
            )


def leave_interrupts(worker: int) -> None:
    """Let a worker process ignore Ctrl-C, which meets all processes: the main one ends the workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def find_images(folder: Path, part: str, classes: int, transform: Any) -> Any:
    """Return the images below `folder/part` as a torchvision `ImageFolder`.

    Raises:
        Error: they are not laid out as they should be.
    """
    datasets = import_torchvision("torchvision.datasets")
    place, asked = folder / part, f"put ImageNet there as {LAYOUT}"
    if not folder.is_dir():
        raise Error(f"--data {folder}: no such folder; name one that has {LAYOUT}", USAGE)
    if not place.is_dir():
        raise Error(f"--data {folder}: has no folder {part}/; {asked}", USAGE)
    try:
        names = [entry.name for entry in place.iterdir() if entry.is_dir()]
        if not names:
            raise Error(
                f"--data {folder}: {part}/ has no folders of classes; sort its images into {part}/<class>/", USAGE
            )
        if len(names) != classes:
            raise Error(f"--data {folder}: {part}/ has {len(names)} folders of classes, not {classes}; {asked}", USAGE)
        return datasets.ImageFolder(str(place), transform, loader=load_image)
    except OSError as error:
        said = error.strerror or str(error).partition(". Supported")[0]
        raise Error(f"--data {folder}: {part}/ cannot be used ({said}); {asked}", USAGE) from error


def load_image(path: str) -> Any:
    """Return the image in a file, in colours.

    Raises:
        Error: the file cannot be read as an image; torchvision would not say which it was.
    """
    image = importlib.import_module("PIL.Image")
    try:
        with image.open(path) as opened:
            return opened.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise Error(f"{path} cannot be read as an image: put the file there anew") from error


def import_torchvision(module: str) -> Any:
    """Import a module of torchvision.

    Raises:
        Error: torchvision, or Pillow, is missing or broken.
    """
    try:
        return importlib.import_module(module)
    except Exception as error:
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        raise Error(f"ImageNet is read by torchvision, which cannot be imported here ({cause}): install it anew") \
            from error  # fmt: skip


def _differences(train: list[str], val: list[str]) -> list[tuple[str, str]]:
    return [(name, "train" if name in train else "val") for name in sorted({*train} ^ {*val})]
