"""Tests of the data sets of experiments.

An epoch must have the same samples in each run. A wrong folder must lead to an error.
"""

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from reproduce.error import Error
from reproduce.experiments import EXPERIMENTS
from reproduce.experiments.datasets import Gratings, ImageNet, prepare

Image = pytest.importorskip("PIL.Image")


def gratings(seed: int = 0, noise: float = 0.1, classes: int = 4) -> Gratings:
    size = {"train_size": 22, "val_size": 10, "image_size": 16}
    return Gratings(**size, classes=classes, noise=noise, seed=seed)


def fill(folder: Path, *files: str) -> Path:
    """Write images into files such as `train/n01/a`."""
    gradient = Image.linear_gradient("L")
    for shade, file in enumerate(files):
        name = file if "." in file else f"{file}.JPEG"
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        image = gradient.rotate(20 * shade).resize((40 + shade, 40))
        image.save(path, "JPEG")
    return folder


def joined(batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    images, labels = zip(*batches, strict=True)
    return torch.cat(images), torch.cat(labels)


@pytest.mark.parametrize(("made", "shape"), [(True, (22, 3, 16, 16)), (False, (6, 3, 224, 224))])
def test_every_epoch_is_its_own_and_comes_again(
    made: bool, shape: tuple[int, ...], tmp_path: Path
) -> None:
    train = [f"train/n0{i % 2}/{i}" for i in range(7)]
    val = [f"val/n0{i % 2}/{i}" for i in range(3)]
    data: Gratings | ImageNet = gratings()
    if not made:
        data = ImageNet(fill(tmp_path, *train, *val), classes=2, workers=1)
    before = torch.get_rng_state()

    images, labels = joined(data.train_batches(2, 1, 2))
    again, same = joined(data.train_batches(2, 1, 2))
    other_epoch, _ = joined(data.train_batches(2, 1, 3))
    other_seed, _ = joined(data.train_batches(2, 2, 2))
    validated, _ = joined(data.val_batches(3))

    assert images.shape == shape, "samples that are too few for a batch are dropped"
    assert images.equal(again)
    assert labels.equal(same)
    assert not labels.equal(labels.sort().values)
    assert not images.equal(other_epoch)
    assert not images.equal(other_seed)
    assert validated.shape == (data.val_size, *shape[1:]), "no sample of these is dropped"
    after = torch.get_rng_state()
    assert after.equal(before), "nothing is drawn from the training's random numbers"


def test_the_class_is_the_direction_of_the_wave() -> None:
    """Check generated images of waves, where the direction of the wave is the class to learn.

    The pixels of an image of class 0 vary along rows only. Those of class 1 vary along columns
    only. In this test, the images have no noise.
    """
    images, labels = gratings(noise=0.0, classes=2).train
    other_images, _ = gratings(seed=1, noise=0.0, classes=2).train
    for image, label in zip(images, labels, strict=True):
        constant, varying = (1, 2) if label == 0 else (2, 1)  # dimensions
        assert image.diff(dim=constant).abs().max() < 1e-4
        assert image.diff(dim=varying).abs().max() > 0.01
    assert not images.equal(other_images)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            [],
            "train/ cannot be used (No such file or directory); put ImageNet there as "
            "train/<class>/*.JPEG and val/",
        ),
        (
            ["train/a/1", "train/b/1", "val/1"],
            "val/ cannot be used (Couldn't find any class folder in ",
        ),
        (["train/a/1", "val/a/1"], "train/ has 1 folders of classes, not 2; put ImageNet there"),
        (
            ["train/a/1", "train/b/1", "val/a/1", "val/c/1"],
            "train/ has a folder of the class b, but val/ has none; add this folder to val/",
        ),
        (
            ["train/a/1", "train/b/1.txt"],
            "train/ cannot be used (Found no valid file for the classes b); put",
        ),
    ],
)
def test_a_folder_that_is_no_imagenet(files: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(Error) as caught:
        ImageNet(fill(tmp_path, *files), classes=2, workers=1)
    message = str(caught.value)
    assert message.startswith(f"--data {tmp_path}: ")
    assert said in message
    assert "\n" not in message


def test_a_broken_image_is_named_and_imagenet_needs_a_folder(tmp_path: Path) -> None:
    """Check the errors for a broken image, and for an experiment without its data set.

    The first error names the file, although a worker process reads it. The second one asks for the
    option `--data`.
    """
    data = ImageNet(fill(tmp_path, "train/a/1", "val/a/1"), classes=1, workers=1)
    (tmp_path / "train/a/1.JPEG").write_bytes(b"no image")
    said = r"^/.*/1.JPEG cannot be read as an image: replace the file$"
    with pytest.raises(Error, match=said):
        list(data.train_batches(1, 0, 0))

    experiment = EXPERIMENTS["resnet101-accuracy"]
    said = "scale paper trains on ImageNet: name its folder by --data DIR, which must have"
    with pytest.raises(Error, match=said):
        prepare(experiment.name, experiment.scale("paper"), None, 0, None)  # type: ignore[arg-type]
