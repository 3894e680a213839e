"""Read ImageNet from a folder that the user names, cropped as the publication says."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from reproduce.error import USAGE, Error
from reproduce.models.resnet import import_torchvision
from reproduce.run.accuracy.datasets import Batch, epoch_seed

LAYOUT = "train/<class>/*.JPEG and val/<class>/*.JPEG"
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's values; not in the publication


class ImageNet:
    """Read the images of a folder laid out as `LAYOUT`, one subfolder for each class.

    Training images are cropped at random to 224 x 224 (8 to 100 % of the area) and flipped at random; images to
    evaluate on are resized to 256 and cropped in the middle. Worker processes read and crop.
    """

    def __init__(self, folder: Path, classes: int, workers: int) -> None:
        """List all files.

        Raises:
            Error: there is no such folder, it is laid out otherwise, or torchvision is missing; in one line.
        """
        transforms = import_torchvision("transforms", "ImageNet")
        normalize = [transforms.ToTensor(), transforms.Normalize(MEAN, DEVIATION)]
        train = [transforms.RandomResizedCrop(224, scale=(0.08, 1.0)), transforms.RandomHorizontalFlip()]
        val = [transforms.Resize(256), transforms.CenterCrop(224)]
        self.workers = workers
        self.train = find_images(folder, "train", classes, transforms.Compose([*train, *normalize]))
        self.val = find_images(folder, "val", classes, transforms.Compose([*val, *normalize]))
        self.train_size, self.val_size = len(self.train), len(self.val)
        if missing := sorted({*self.train.classes} - {*self.val.classes}):
            raise Error(f"--data {folder}: val/ has no folder {missing[0]}, and train/ has; put it there", USAGE)

    def train_batches(self, batch_size: int, seed: int, epoch: int) -> Iterator[Batch]:
        """Yield one epoch's mini-batches, as `Gratings` does."""
        return self._read(self.train, batch_size, epoch_seed(seed, epoch), train=True)

    def val_batches(self, batch_size: int) -> Iterator[Batch]:
        """Yield all images to evaluate on."""
        return self._read(self.val, batch_size, 0, train=False)

    def _read(self, images: Any, batch_size: int, seed: int, *, train: bool) -> Iterator[Batch]:
        loader = torch.utils.data.DataLoader(
            images,
            batch_size=batch_size,
            num_workers=self.workers,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=leave_interrupts,
            generator=torch.Generator().manual_seed(seed),  # or it would draw from the default one
            shuffle=train,
            drop_last=train,
        )
        try:
            yield from loader
        except Error as error:  # a worker's: its message ends a traceback
            raise Error(str(error).splitlines()[-1].removeprefix("reproduce.error.Error: ")) from None


def leave_interrupts(worker: int) -> None:
    """Let a worker process ignore Ctrl-C, which meets all processes: the main one ends the workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def find_images(folder: Path, part: str, classes: int, transform: Any) -> Any:
    """Return the images below `folder/part` as a torchvision `ImageFolder`.

    Raises:
        Error: they are not laid out as they should be.
    """
    try:
        found = import_torchvision("datasets", "ImageNet").ImageFolder(str(folder / part), transform, loader=load_image)
        problem = f"has {len(found.classes)} folders of classes, not {classes}"
    except OSError as error:
        found, problem = None, f"cannot be used ({error.strerror or str(error).partition('. Supported')[0]})"
    if found is None or len(found.classes) != classes:
        raise Error(f"--data {folder}: {part}/ {problem}; put ImageNet there as {LAYOUT}", USAGE)
    return found


def load_image(path: str) -> Any:
    """Return the image in a file, in colours.

    Raises:
        Error: the file cannot be read as an image; torchvision would not say which it was.
    """
    from PIL import Image

    try:
        with Image.open(path) as opened:
            return opened.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise Error(f"{path} cannot be read as an image: put the file there anew") from error
