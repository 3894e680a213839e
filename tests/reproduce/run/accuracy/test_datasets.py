"""Data sets: an epoch is always the same, and a wrong folder is a one-line error."""

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from reproduce.error import Error
from reproduce.experiments import EXPERIMENTS
from reproduce.run.accuracy.datasets import Gratings, ImageNet, prepare

Image = pytest.importorskip("PIL.Image")


def gratings(seed: int = 0, noise: float = 0.1, classes: int = 4) -> Gratings:
    return Gratings(
        train_size=22, val_size=10, classes=classes, image_size=16, noise=noise, seed=seed
    )


def fill(folder: Path, *files: str) -> Path:
    """Write images into files such as `train/n01/a`."""
    for shade, file in enumerate(files):
        path = folder / (file + ".JPEG" * ("." not in file))
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.linear_gradient("L").rotate(20 * shade).resize((40 + shade, 40)).save(path, "JPEG")
    return folder


def joined(
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = zip(*batches, strict=True)
    return torch.cat(images), torch.cat(labels)


@pytest.mark.parametrize(("made", "shape"), [(True, (22, 3, 16, 16)), (False, (6, 3, 224, 224))])
def test_every_epoch_is_its_own_and_comes_again(
    made: bool, shape: tuple[int, ...], tmp_path: Path
) -> None:
    names = [
        f"{part}/n0{i % 2}/{i}" for part, count in (("train", 7), ("val", 3)) for i in range(count)
    ]
    data = gratings() if made else ImageNet(fill(tmp_path, *names), classes=2, workers=1)
    before = torch.get_rng_state()
    images, labels = joined(data.train_batches(2, 1, 2))
    again, same = joined(data.train_batches(2, 1, 2))
    assert images.shape == shape, "what is left over is dropped"
    assert images.equal(again) and labels.equal(same) and not labels.equal(labels.sort().values)
    assert not any(
        images.equal(joined(data.train_batches(2, *other))[0]) for other in ((1, 3), (2, 2))
    )
    assert joined(data.val_batches(3))[0].shape == (data.val_size, *shape[1:]), (
        "of these, nothing is"
    )
    assert torch.get_rng_state().equal(before), (
        "nothing is drawn from the training's random numbers"
    )


def test_the_class_is_the_direction_of_the_wave() -> None:
    """Without noise, a wave of class 0 (of 2) varies along a row only, one of class 1 along a column only."""
    images, labels = gratings(noise=0.0, classes=2).train
    for image, label in zip(images, labels, strict=True):
        constant = 1 if label == 0 else 2  # the dimension along which nothing changes
        assert (
            image.diff(dim=constant).abs().max() < 1e-4
            and image.diff(dim=3 - constant).abs().max() > 0.01
        )
    assert not images.equal(gratings(seed=1, noise=0.0, classes=2).train[0])


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            [],
            "train/ cannot be used (No such file or directory); put ImageNet there as train/<class>/*.JPEG and val/",
        ),
        (
            ["train/a/1", "train/b/1", "val/1"],
            "val/ cannot be used (Couldn't find any class folder in ",
        ),
        (["train/a/1", "val/a/1"], "train/ has 1 folders of classes, not 2; put ImageNet there"),
        (
            ["train/a/1", "train/b/1", "val/a/1", "val/c/1"],
            "val/ has no folder b, and train/ has; put it there",
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
    assert message.startswith(f"--data {tmp_path}: ") and said in message and "\n" not in message


def test_a_broken_image_is_named_and_imagenet_needs_a_folder(tmp_path: Path) -> None:
    """Also from a worker process, whose errors are tracebacks."""
    data = ImageNet(fill(tmp_path, "train/a/1", "val/a/1"), classes=1, workers=1)
    (tmp_path / "train/a/1.JPEG").write_bytes(b"no image")
    with pytest.raises(
        Error, match=r"^/.*/1.JPEG cannot be read as an image: put the file there anew$"
    ):
        list(data.train_batches(1, 0, 0))
    experiment = EXPERIMENTS["resnet101-accuracy"]
    with pytest.raises(
        Error,
        match="scale paper trains on ImageNet: name its folder by --data DIR, which must have",
    ):
        prepare(experiment.name, experiment.scale("paper"), None, 0, None)  # type: ignore[arg-type]
