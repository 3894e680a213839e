"""Data sets: an epoch is the same whenever it is asked for, and a folder that is none is told in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from reproduce.error import Error
from reproduce.run.accuracy.datasets import Gratings, epoch_seed
from reproduce.run.accuracy.imagenet import ImageNet
from reproduce.run.accuracy.needs import Dataset

Image = pytest.importorskip("PIL.Image")
GRATINGS = Gratings(train_size=22, val_size=10, classes=4, image_size=16, noise=0.1, seed=0)


def epoch(data: Dataset, seed: int, epoch: int, batch_size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    batches = list(data.train_batches(batch_size, seed, epoch))
    assert {len(labels) for _, labels in batches} == {batch_size}, "what is left over is dropped"
    return torch.cat([images for images, _ in batches]), torch.cat([labels for _, labels in batches])


def save(path: Path, shade: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.linear_gradient("L").rotate(shade)
    picture.resize((40 + shade % 7, 40)).save(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("imagenet")
    for part, count in (("train", 3), ("val", 2)):
        for name in ("n01", "n02"):
            for i in range(count):
                save(root / part / name / f"{name}_{i}.JPEG", 20 * i + 90 * (name == "n02"))
    return root


def test_every_epoch_is_its_own_and_comes_again() -> None:
    images, labels = epoch(GRATINGS, seed=1, epoch=2)
    again, same = epoch(GRATINGS, seed=1, epoch=2)
    assert images.shape == (20, 3, 16, 16) and images.equal(again) and labels.equal(same)
    for others, _ in (epoch(GRATINGS, seed=1, epoch=3), epoch(GRATINGS, seed=2, epoch=2)):
        assert not images.equal(others)
    assert epoch_seed(0, 90) < epoch_seed(1, 0), "seeds share no epoch"
    drawn, other = (Gratings(train_size=22, val_size=10, classes=4, image_size=16, noise=0.1, seed=s) for s in (0, 1))
    assert drawn.train[0].equal(GRATINGS.train[0]) and not other.train[0].equal(GRATINGS.train[0])


def test_images_to_evaluate_on_are_all_there() -> None:
    batches = list(GRATINGS.val_batches(4))
    assert [len(labels) for _, labels in batches] == [4, 4, 2]
    assert torch.cat([labels for _, labels in batches]).bincount().tolist() == [3, 3, 2, 2]
    assert not torch.cat([images for images, _ in batches])[0].equal(GRATINGS.train[0][0][..., 1:17, 1:17])


def test_the_class_is_the_direction_of_the_wave() -> None:
    """Without noise, a wave of class 0 (of 2) varies along a row only, one of class 1 along a column only."""
    made = Gratings(train_size=8, val_size=2, classes=2, image_size=16, noise=0.0, seed=0)
    images, labels = made.train
    for image, label in zip(images, labels, strict=True):
        constant = 1 if label == 0 else 2  # the dimension along which nothing changes
        torch.testing.assert_close(image.diff(dim=constant), torch.zeros(()).expand_as(image.diff(dim=constant)),
                                   atol=1e-4, rtol=0)  # fmt: skip
        assert float(image.diff(dim=3 - constant).abs().max()) > 0.01


def test_imagenet_is_cropped_as_published(folder: Path) -> None:
    data = ImageNet(folder, classes=2, workers=1)
    assert (data.train_size, data.val_size) == (6, 4)
    images, labels = epoch(data, seed=0, epoch=0, batch_size=2)
    assert images.shape == (6, 3, 224, 224) and sorted(labels.tolist()) == [0, 0, 0, 1, 1, 1]
    again, same = epoch(data, seed=0, epoch=0, batch_size=2)
    assert images.equal(again) and labels.equal(same)
    others, order = epoch(data, seed=0, epoch=1, batch_size=2)
    assert not images.equal(others)
    assert [labels.tolist(), order.tolist()] != 2 * [[0, 0, 0, 1, 1, 1]], "not in the folder's order"
    before = torch.get_rng_state()
    (batch,) = data.val_batches(8)
    assert batch[1].tolist() == [0, 0, 1, 1] and batch[0].shape == (4, 3, 224, 224)
    assert torch.get_rng_state().equal(before), "reading draws nothing from the training's random numbers"


def flat(root: Path) -> None:
    save(root / "train" / "n01" / "a.JPEG", 1)
    save(root / "val" / "ILSVRC2012_val_00000001.JPEG", 1)


def other_class(root: Path) -> None:
    for part, name in (("train", "n01"), ("train", "n02"), ("val", "n01"), ("val", "n03")):
        save(root / part / name / "a.JPEG", 1)


def empty_class(root: Path) -> None:
    other_class(root)
    (root / "train" / "n02" / "a.JPEG").unlink()


@pytest.mark.parametrize(
    ("make", "classes", "said"),
    [
        (lambda root: root.rmdir(), 2, "no such folder; name one that has train/<class>/*.JPEG and val/<class>/*.JPEG"),
        (lambda root: None, 2, "has no folder train/; put ImageNet there as train/<class>/*.JPEG and val/<class>"),
        (lambda root: save(root / "train" / "n01" / "a.JPEG", 1), 1, "has no folder val/; put"),
        (flat, 1, "val/ has no folders of classes; sort its images into val/<class>/"),
        (other_class, 1000, "train/ has 2 folders of classes, not 1000; put ImageNet there"),
        (other_class, 2, "class n02 is in train/ only; val/ must have the same classes"),
        (empty_class, 2, "train/ cannot be used (Found no valid file for the classes n02); put ImageNet"),
    ],
)
def test_a_folder_that_is_no_imagenet(make: Callable[[Path], None], classes: int, said: str, tmp_path: Path) -> None:
    root = tmp_path / "data"
    root.mkdir()
    make(root)
    with pytest.raises(Error) as caught:
        ImageNet(root, classes=classes, workers=1)
    message = str(caught.value)
    assert message.startswith(f"--data {root}: ") and said in message and "\n" not in message


def test_torchvision_that_cannot_be_imported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torchvision.transforms", None)
    with pytest.raises(Error, match=r"^ImageNet needs torchvision, which cannot be imported here \(.*install"):
        ImageNet(folder, classes=2)
