"""Get ready what an experiment on accuracy needs: data and seeds."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from reproduce.error import USAGE, Error
from reproduce.experiments import AccuracyScale, Experiment
from reproduce.run.accuracy.datasets import Gratings
from reproduce.run.accuracy.imagenet import LAYOUT, ImageNet


class AccuracyNeeds(NamedTuple):
    """Hold what only experiments on accuracy need; every row is trained once from each of the `seeds`."""

    data: Gratings | ImageNet
    seeds: range


def prepare(
    experiment: Experiment, scale: AccuracyScale, folder: Path | None, seed: int, seeds: int | None
) -> AccuracyNeeds:
    """Find the experiment's data in `folder`, or make them from the seed where the scale says how.

    Raises:
        Error: there are none, or they are not as they should be.
    """
    trained = range(seed, seed + (seeds or scale.seeds))
    if scale.made is not None:
        if folder is not None:
            raise Error(f"--data {folder}: scale {scale.name} makes its own data; leave --data out", USAGE)
        return AccuracyNeeds(Gratings(**scale.made, seed=seed), trained)
    if folder is None:
        raise Error(
            f"{experiment.name} at scale {scale.name} trains on ImageNet: name its folder by --data DIR, "
            f"which must have {LAYOUT}; or use --scale small",
            USAGE,
        )
    row = scale.rows[0]
    return AccuracyNeeds(ImageNet(folder, row.num_classes, dict(row.data)["dataloader_workers"]), trained)
