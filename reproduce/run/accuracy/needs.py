"""Get ready what an experiment on accuracy needs: data, seeds, and a place for checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from reproduce.error import USAGE, Error
from reproduce.experiments import AccuracyScale, Experiment
from reproduce.run.accuracy.checkpoints import Checkpoints
from reproduce.run.accuracy.datasets import Gratings
from reproduce.run.accuracy.imagenet import LAYOUT, ImageNet

Dataset = Gratings | ImageNet


@dataclass
class AccuracyNeeds:
    """Hold what only experiments on accuracy need; every row is trained once from each of the `seeds`."""

    data: Dataset
    seeds: range
    checkpoints: Checkpoints
    resumes: bool = False  # whether it was said that trainings go on from checkpoints


def prepare_data(experiment: Experiment, scale: AccuracyScale, folder: Path | None, seed: int) -> Dataset:
    """Find the experiment's data in `folder`, or make them from the seed where the scale says how.

    Raises:
        Error: there are none, or they are not as they should be.
    """
    if scale.made is not None:
        if folder is not None:
            raise Error(f"--data {folder}: scale {scale.name} makes its own data; leave --data out", USAGE)
        return Gratings(**vars(scale.made), seed=seed)
    if folder is None:
        raise Error(
            f"{experiment.name} at scale {scale.name} trains on ImageNet: name its folder by --data DIR, "
            f"which must have {LAYOUT}; or use --scale small",
            USAGE,
        )
    row = scale.rows[0]
    return ImageNet(folder, classes=row.num_classes, workers=dict(row.data)["dataloader_workers"])
